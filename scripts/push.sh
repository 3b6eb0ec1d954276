#!/usr/bin/env bash
# push.sh [--pull-test] IMAGE...: push images to a registry, and prove that what lies there is what was pushed.
#
#   REGISTRY=127.0.0.1:5000/allranks push.sh allranks-base pytorch-ddp
#   REGISTRY=127.0.0.1:5000/allranks push.sh --pull-test allranks-base pytorch-ddp
#
# Each image gets three tags: latest, its version label (2.5.1-cuda12.2) and the git revision. A base goes before its
# children, so that the torch layer travels once. The digest of each tag is read back from the registry, compared with
# what docker push said, and kept in build/digests.txt as REFERENCE@sha256:... Credentials are docker's own
# (docker login); plain http is for loopback.
# --pull-test drops the local REGISTRY tags, pulls each line of that file by digest and runs PULL_TEST_COMMAND in it
# (default: python -m allranks explain --json), without a network. A working tree with changes, and an image of another
# revision, are refused before anything is pushed; DIRTY=1 pushes them, with REVISION-dirty for the third tag.
# Exit status: 64 called wrongly, 65 changes in the working tree, 66 no such image (or no line of it), 67 image of
# another revision, 68 push or reading back failed, 69 digests differ, 70 a pull test failed.
set -euo pipefail

main() {
  if [[ ${1:-} == -h || ${1:-} == --help ]]; then sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit; fi
  local job=push
  if [[ ${1:-} == --pull-test ]]; then job=pull_test && shift; fi
  [[ $# != 0 && $1 != -* ]] || refuse 64 "${1:-no IMAGE}" "[--pull-test] IMAGE..." "see push.sh --help"
  registry=${REGISTRY:-} && registry=${registry%/}
  [[ -n $registry && $registry != *://* ]] ||
    refuse 64 "REGISTRY is '$registry'" "host:port/namespace" "make ${job/_/-} REGISTRY=127.0.0.1:5000/allranks"
  if [[ -t 2 ]]; then screen=/dev/tty; else screen=/dev/null; fi # for docker's progress
  cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/.."
  "$job" "$@"
}

push() {
  local revision dirty='' image label=org.opencontainers.image format layers id version built order=''
  attempt 65 "a git checkout" "push from one" git rev-parse --short HEAD
  revision=$said
  attempt 65 "a git checkout" "push from one" git status --porcelain -- . ':!build' # build/ is this script's own
  [[ -z $said ]] || unless_dirty 65 "the working tree has changes: ${said%%$'\n'*}" "none" "commit and make build"
  format="{{with .Config}}{{index .Labels \"$label.version\"}}|{{index .Labels \"$label.revision\"}}{{end}}"
  for image; do
    attempt 66 "the image $image" "make build" \
      docker image inspect --format "{{len .RootFS.Layers}}|{{.Id}}|$format" "$image"
    IFS='|' read -r layers id version built <<<"${said##*$'\n'}"
    [[ $version =~ ^[A-Za-z0-9_][A-Za-z0-9_.-]*$ ]] ||
      refuse 66 "label $label.version of $image is '$version'" "a version that can be a tag" "make build"
    [[ $built == "$revision" ]] ||
      unless_dirty 67 "label $label.revision of $image is '$built'" "this checkout's $revision" "make build"
    order+="$layers|${image##*/}|$id|$version"$'\n'
  done
  mkdir -p build && : >build/digests.txt
  while IFS='|' read -r -u 3 _ image id version; do # a base has fewer layers than its children
    push_one "${image%%:*}" "$id" latest "$version" "$revision$dirty"
  done 3< <(sort -s -n <<<"${order%$'\n'}")
}

push_one() { # NAME ID TAG...: by id, as another build may move the name meanwhile
  local reference digest tag began=$SECONDS
  for tag in "${@:3}"; do
    reference=$registry/$1:$tag
    attempt 64 "a REGISTRY that docker takes" "correct it" docker tag "$2" "$reference"
    attempt 68 "to push $reference" "is the registry there, and docker logged in?" transfer push "$reference"
    digest=${said##*digest: } && digest=${digest%% *}
    attempt 68 "to read the digest of $reference back" "push again" \
      docker buildx imagetools inspect --format '{{print .Manifest.Digest}}' "$reference" # without print: a table
    [[ ${said##*$'\n'} == "$digest" ]] || refuse 69 "$reference is ${said##*$'\n'} in the registry" \
      "$digest, which docker pushed" "find out who else writes there, and push again"
    echo "$reference@$digest" >>build/digests.txt
  done
  echo "pushed $reference tags=$3,$4,$5 digest=$digest seconds=$((SECONDS - began))"
}

pull_test() {
  local image name line lines command failed=0
  read -ra command <<<"${PULL_TEST_COMMAND-python -m allranks explain --json}"
  for image; do
    image=${image##*/} && name=$registry/${image%%:*}
    lines=$(awk -v start="$name:" 'index($0, start) == 1' build/digests.txt 2>&1) && [[ -n $lines ]] ||
      refuse 66 "no line of $name in build/digests.txt" "those of a push" "make push REGISTRY=$registry"
    for line in $lines; do (pull_one "$line" "${command[@]}") || failed=70; done
  done
  return "$failed"
}
pull_one() { # REFERENCE@DIGEST COMMAND...
  local began=$SECONDS
  docker rmi "${1%@*}" >/dev/null 2>&1 || true # it need not be here
  attempt 70 "to pull $1" "push again" transfer pull "$1"
  attempt 70 "status 0 of '${*:2}' in $1" "run it by hand" docker run --rm --pull never --network none "$@"
  echo "pulled $1 seconds=$((SECONDS - began))"
}

transfer() { docker "$@" 2>&1 | tee "$screen"; }
attempt() { # STATUS EXPECTED TODO COMMAND...: what it says is in $said, and its last line in the error
  said=$("${@:4}" 2>&1) && return
  said=${said%$'\n\n'"Run 'docker "*} && refuse "$1" "${said##*$'\n'}" "$2" "$3"
}
unless_dirty() { # STATUS SEEN EXPECTED TODO
  if [[ ${DIRTY:-} == 1 ]]; then dirty=-dirty; else refuse "${@:1:3}" "$4, or push all the same with DIRTY=1"; fi
}
refuse() { echo "push.sh: $2; expected $3; $4" >&2; exit "$1"; } # STATUS SEEN EXPECTED TODO

main "$@"
