# The image of every step and of the training pods: Python 3.12, torch with its CUDA libraries, NVRx 0.7, AWS's EFA
# stack with the NCCL plugin, and this project. Python and AWS packages are pinned; nothing is fetched when it runs.
#
#     docker build -t holdfast:0.1.0 .
#
# The driver comes from the node (EKS's accelerated AMI); CUDA's libraries come with torch's wheels.

# Ubuntu 24.04 of one day, since NVRx 0.6 and later need glibc 2.39. By digest, from your registry: --build-arg BASE=...@sha256:...
ARG BASE=ubuntu:noble-20251013
FROM ${BASE} AS base
ENV DEBIAN_FRONTEND=noninteractive
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3.12 python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

# Python packages, in a layer that changes only when their pins do.
FROM base AS packages
COPY docker/constraints.txt /tmp/constraints.txt
RUN python3.12 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir --no-compile --require-virtualenv --only-binary=:all: \
        --requirement /tmp/constraints.txt \
    && /opt/venv/bin/pip check

FROM base AS image
# libfabric's EFA provider and aws-ofi-nccl, as AWS's installer lays them out (/opt/amazon). No kernel module: it is the
# node's.
ARG EFA_INSTALLER_VERSION=1.42.0
ARG EFA_INSTALLER_SHA256=4114fe612905ee05083ae5cb391a00a012510f3abfecc642d86c9a5ae4be9008
RUN apt-get update && apt-get install -y --no-install-recommends curl pciutils \
    && curl --fail --silent --show-error --retry 3 --location --output /tmp/efa.tar.gz \
        "https://efa-installer.amazonaws.com/aws-efa-installer-${EFA_INSTALLER_VERSION}.tar.gz" \
    && echo "${EFA_INSTALLER_SHA256}  /tmp/efa.tar.gz" | sha256sum --check - \
    && tar -xzf /tmp/efa.tar.gz -C /tmp \
    && cd /tmp/aws-efa-installer \
    && ./efa_installer.sh --yes --skip-kmod --skip-limit-conf --no-verify \
    && rm -rf /tmp/efa.tar.gz /tmp/aws-efa-installer /var/lib/apt/lists/* \
    && ldconfig
# For --compile true: triton builds its launchers with a C compiler and Python's headers when a step is first compiled.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev python3.12-dev && rm -rf /var/lib/apt/lists/*
ENV LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu:/opt/amazon/ofi-nccl/lib:/opt/amazon/efa/lib \
    PATH=/opt/venv/bin:/opt/amazon/efa/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

# The user that every manifest names; Ubuntu gave 1000 to one of its own.
RUN userdel --remove ubuntu && groupadd --gid 1000 holdfast && useradd --uid 1000 --gid 1000 --create-home holdfast
COPY --from=packages /opt/venv /opt/venv
COPY pyproject.toml README.md LICENSE /src/
COPY trainer /src/trainer
COPY steps /src/steps
COPY workflows /src/workflows
RUN pip install --no-cache-dir --no-deps --no-build-isolation /src && rm -rf /src \
    && python -c "import steps.node, steps.train, trainer.loop"

USER 1000:1000
WORKDIR /home/holdfast
ENV HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# Every template says what to run; an entrypoint saves Argo from looking it up in the registry.
ENTRYPOINT ["python"]
