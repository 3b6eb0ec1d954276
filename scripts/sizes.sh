#!/usr/bin/env bash
# sizes.sh BASE CHILD...: the unpacked size of each image in MB, and what each child adds to the base.
# Exit status 1 where one is larger than BASE_BUDGET or CHILD_BUDGET of .env (and images/base/VARIANT.env) allow.
set -euo pipefail
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/.."
# shellcheck source=/dev/null
source .env
# shellcheck source=/dev/null
[[ -z ${VARIANT:-} ]] || source "images/base/$VARIANT.env"

size() { docker image inspect --format '{{.Size}}' "$1"; }
over=0
check() { # NAME MB BUDGET WORD
  printf '%-20s %5d MB%s, of %d allowed\n' "$1" "$2" "$4" "$3"
  if (($2 > $3)); then
    echo "sizes.sh: $1 has grown to $2 MB$4; expected at most $3; leave something out, or raise the budget in .env" >&2
    over=1
  fi
}

base=$1 base_size=$(size "$1")
check "$base" $((base_size / 1000000)) "$BASE_BUDGET" ""
for image in "${@:2}"; do
  check "$image" $((($(size "$image") - base_size) / 1000000)) "$CHILD_BUDGET" " more"
done
exit $over
