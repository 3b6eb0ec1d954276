#!/usr/bin/env bash
# Starts an SSH server when SSH_PUBLIC_KEY holds a key (SSH_PORT: 22), then becomes the command.
# Options alone ("--backend nccl") are given to the image's own script, DEFAULT_COMMAND.
# Nothing else depends on this file: a platform that replaces the entrypoint loses SSH only.
set -euo pipefail

start_sshd() {
  local dir uid
  dir=$(mktemp -d /tmp/sshd.XXXXXX 2>/dev/null || mktemp -d /dev/shm/sshd.XXXXXX) && uid=$(id -u)
  if ! getent passwd "$uid" >/dev/null; then
    echo "allranks: no SSH server: uid $uid has no entry in /etc/passwd; start the container as uid 1000" >&2
    return
  fi
  ssh-keygen -q -t ed25519 -N '' -f "$dir/host_key"
  printf '%s\n' "$SSH_PUBLIC_KEY" >"$dir/authorized_keys"
  cat >"$dir/config" <<END
Port ${SSH_PORT:-22}
HostKey $dir/host_key
AuthorizedKeysFile $dir/authorized_keys
PidFile none
AuthenticationMethods publickey
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitEmptyPasswords no
PermitRootLogin prohibit-password
UsePAM no
StrictModes no
SetEnv PATH=$PATH
END
  [[ $uid != 0 ]] || mkdir -p /run/sshd
  /usr/sbin/sshd -f "$dir/config" || echo "allranks: no SSH server on port ${SSH_PORT:-22}: try SSH_PORT=2222" >&2
}

if [[ -n ${SSH_PUBLIC_KEY:-} ]]; then start_sshd; fi
if [[ ${1:-} == -* ]]; then
  read -ra default <<<"${DEFAULT_COMMAND:-python -m allranks run}"
  set -- "${default[@]}" "$@"
fi
exec "$@"
