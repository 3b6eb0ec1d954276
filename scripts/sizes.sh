#!/usr/bin/env bash
# sizes.sh BASE CHILD...: the unpacked size of each image in MB; exit status 1 where BASE adds more to the image that it
# is made from, or a child to BASE, than BASE_BUDGET and CHILD_BUDGET of .env (and images/base/VARIANT.env) allow.
set -euo pipefail
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/.."
# shellcheck source=/dev/null
source .env
# shellcheck source=/dev/null
[[ -z ${VARIANT:-} ]] || source "images/base/$VARIANT.env"

# MB of an image, or of what was put on it since the line of its history that has WORDS. Not the size that `docker images`
# shows: where containerd keeps the images, that one is of compressed layers.
size() { # IMAGE [WORDS]
  docker history --no-trunc --human=false --format '{{.Size}} {{.CreatedBy}}' "$1" |
    awk -v words="${2:-}" 'words && index($0, words) {below = 1} !below {sum += $1} END {printf "%d", sum / 1e6}'
}
over=0
check() { # NAME TOTAL ADDED BUDGET
  printf '%-20s %5d MB: %5d more than what it is made from, of %d allowed\n' "$@"
  if (($3 > $4)); then
    echo "sizes.sh: $1 has grown by $3 MB; expected at most $4; leave something out, or raise the budget in .env" >&2
    over=1
  fi
}

base=$(size "$1")
check "$1" "$base" "$(size "$1" 'SHELL [')" "$BASE_BUDGET" # its Dockerfile's first line after FROM
for image in "${@:2}"; do
  total=$(size "$image")
  check "$image" "$total" $((total - base)) "$CHILD_BUDGET"
done
exit $over
