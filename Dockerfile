# The project in an image, with everything built. On a CPU, or for CUDA 13:
#   docker build -t scaling .
#   docker build -t scaling:cuda13 --build-arg BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04 \
#       --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
# BASE is any Debian or Ubuntu with Python 3.11 or newer; TORCH_INDEX says which wheels of torch.
ARG BASE=debian:12.12-slim
FROM ${BASE}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# the versions of the base, whatever they are
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        ca-certificates g++ git make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1234 scaling \
    && install --directory --owner=scaling --group=scaling /opt/scaling /opt/venv

USER 1234
WORKDIR /opt/scaling
ENV PATH=/opt/venv/bin:$PATH

# before the code, so that a change of code leaves this layer alone
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY --chown=scaling:scaling requirements.txt ./
RUN python3 -m venv /opt/venv \
    && pip install --no-cache-dir --index-url "$TORCH_INDEX" "$(sed -n 's/^\(torch[<>=][^ ]*\).*/\1/p' requirements.txt)" \
    && pip install --no-cache-dir --requirement requirements.txt

COPY --chown=scaling:scaling . .
RUN pip install --no-cache-dir --no-build-isolation --no-deps --editable . && mkdir experiments

CMD ["bash", "examples_scaling/quickstart/quickstart.sh"]
