# pytorch-ddp with both MPIs' mpirun, and the user of THD's guide: what compose/mpi.yml runs.
ARG DDP=pytorch-ddp
# hadolint ignore=DL3006
FROM ${DDP}
USER 0
# hadolint ignore=DL3008
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends mpich openmpi-bin openssh-client \
 && rm -rf /var/lib/apt/lists/* \
 && update-alternatives --set mpirun /usr/bin/mpirun.mpich \
 && usermod --login jim --home /home/jim --move-home allranks \
 && ln -s /opt/ddp /home/jim/project && ln -s start.py /opt/ddp/training.py \
 && install -d -o jim -g 0 -m 770 /keys
USER 1000:0
