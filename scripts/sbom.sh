#!/usr/bin/env bash
# sbom.sh IMAGE...: what each image holds, by syft: build/sbom/IMAGE.spdx.json and IMAGE.cyclonedx.json, and the licences
# of its Python packages (IMAGE.licences.txt); those of its Debian packages are in the image, under /usr/share/doc.
set -euo pipefail
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/.."
mkdir -p build/sbom
export SYFT_CHECK_FOR_APP_UPDATE=false PATH=$PWD/.venv/bin:$PATH
for image in "$@"; do
  file=build/sbom/$image
  syft scan -q "docker:$image" -o "spdx-json=$file.spdx.json" -o "cyclonedx-json=$file.cyclonedx.json"
  container=$(docker create "$image" true)
  docker cp -q "$container:/usr/share/doc/python-licences.txt" "$file.licences.txt"
  docker rm "$container" >/dev/null
  echo "$file: $(grep -o '"purl": *"pkg:\(deb\|pypi\)' "$file.cyclonedx.json" | wc -l) packages"
done
