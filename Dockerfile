# Rooftile on an NVIDIA GPU. Untested: it was written where neither Docker nor a GPU was at hand.
#
#   docker build -t rooftile .
#   docker run --rm --gpus all -v "$PWD/results:/rooftile/results" rooftile             # make sweep
#   docker run --rm --gpus all rooftile make test

FROM pytorch/pytorch:2.11.0-cuda13.0-cudnn9-runtime

# Triton compiles a launcher for each kernel at its first launch.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc git make python3-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /rooftile
COPY . .
CMD ["make", "sweep"]
