# finessl on the CPU. Build it, then run the demo; the runs appear in ./runs:
#     docker build -t finessl .
#     docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/data" finessl
# Any other command: docker run … finessl train photos --out runs/photos --backbone embedded
FROM python:3.13-slim
RUN pip install --no-cache-dir torch torchvision --index-url https://download.pytorch.org/whl/cpu
COPY . /finessl
RUN pip install --no-cache-dir /finessl
# Any user id may run it: caches go where everyone may write.
ENV HOME=/tmp USER=finessl
WORKDIR /data
ENTRYPOINT ["finessl"]
CMD ["demo"]
