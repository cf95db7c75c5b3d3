# docker build -t ebft .                            torch from the package index (with CUDA)
# docker build -t ebft --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .     without CUDA, smaller
# docker build -t ebft --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu126 .   with another CUDA
# docker build -t ebft --build-arg EXTRAS=all .        with all extras
# docker run --gpus all --user $(id -u):$(id -g) -v $PWD:/work -w /work ebft train run.yaml
ARG BASE=ubuntu:24.04
FROM ${BASE}
ARG TORCH_INDEX=
ARG EXTRAS=tensorboard,plots
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PATH=/opt/ebft/bin:$PATH
# torch.compile and flex_attention need a compiler and the headers of Python. Versions are those of the base image.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev python3-venv g++ git \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/ebft
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
COPY examples examples
# Versions are those of constraints.txt.
# hadolint ignore=DL3013
RUN pip install ${TORCH_INDEX:+--index-url ${TORCH_INDEX}} "$(grep '^torch==' constraints.txt)" \
    && pip install -c constraints.txt ".[${EXTRAS}]"
# Any user may run it (`--user`), so that it can write into a mounted folder; PyTorch requires a name.
RUN useradd --create-home ebft && chmod 1777 /home/ebft
ENV HOME=/home/ebft USER=ebft
USER ebft
WORKDIR /home/ebft
ENTRYPOINT ["ebft"]
