#!/usr/bin/env bash
# sbom.sh IMAGE...: what each image holds, by syft: build/sbom/IMAGE.spdx.json and IMAGE.cyclonedx.json, and the licences
# of its Python packages (IMAGE.licences.txt); those of Debian's packages are in the image, under /usr/share/doc.
set -euo pipefail
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/.."
mkdir -p build/sbom
export SYFT_CHECK_FOR_APP_UPDATE=false
for image in "$@"; do
  .venv/bin/syft scan -q "docker:$image" -o "spdx-json=build/sbom/$image.spdx.json" \
    -o "cyclonedx-json=build/sbom/$image.cyclonedx.json"
  docker run --rm --network none --entrypoint cat "$image" /usr/share/doc/python-licences.txt \
    >"build/sbom/$image.licences.txt"
  echo "build/sbom/$image: $(grep -c '"SPDXID": *"SPDXRef-Package' "build/sbom/$image.spdx.json") packages"
done
