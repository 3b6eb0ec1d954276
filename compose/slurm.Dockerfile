# pytorch-ddp with Slurm: what compose/slurm.yml runs.
ARG DDP=pytorch-ddp
# hadolint ignore=DL3006
FROM ${DDP}
# munged and slurmd change to other users
# hadolint ignore=DL3002
USER 0
# hadolint ignore=DL3008
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends slurm-wlm munge \
 && rm -rf /var/lib/apt/lists/* /etc/munge/munge.key \
 && install -d /keys /var/spool/slurmctld /var/spool/slurmd && install -d -o munge /run/munge
