"""A job's only task, as the lease service sees it: registers, obeys, reports. Run inside a job.

Prints ``cores N`` at each change of its lease. When it is told to stop it "checkpoints" (appends to
the file given as argument) and ends with 85; the batch script then waits to be requeued.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

import grpc

from slurm_synergy.proto import lease_pb2 as pb
from slurm_synergy.proto import lease_pb2_grpc as pb_grpc


def main() -> int:
    job, restart = int(os.environ["SLURM_JOB_ID"]), int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    nonce = uuid.uuid4().hex
    payload = f"synergy-register:{job}:{restart}:0:{nonce}"
    socket = os.environ["SYNERGY_MUNGE_SOCKET"]
    argv = ["munge", f"--socket={socket}", "--no-input", "--string", payload]
    credential = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    node = os.environ["SLURMD_NODENAME"]
    task = pb.TaskId(job_id=job, restart_count=restart, rank=0, ranks=1, local_ranks=1, node=node)
    with grpc.insecure_channel(os.environ["SYNERGY_ENDPOINT"]) as channel:
        stub = pb_grpc.LeaseServiceStub(channel)
        reply = stub.Register(
            pb.RegisterRequest(protocol=1, task=task, credential=credential, nonce=nonce)
        )
        token, generation, samples = reply.token, 0, 0
        while not reply.lease.stop:
            if reply.lease.generation != generation:
                generation = reply.lease.generation
                print(f"cores {len(reply.lease.cores)} of {reply.lease.node_cores}", flush=True)
            samples += 10
            reply = stub.Renew(
                pb.RenewRequest(
                    token=token,
                    task=task,
                    known_generation=generation,
                    progress=pb.Progress(step=samples, samples=samples),
                    wait_s=1.0,
                )
            )
        with open(sys.argv[1], "a", encoding="utf-8") as file:
            file.write(f"{restart} {samples}\n")
        stub.Finish(
            pb.FinishRequest(
                token=token,
                task=task,
                exit_code=85,
                checkpointed=True,
                step=samples,
                samples=samples,
            )
        )
    return 85


if __name__ == "__main__":
    sys.exit(main())
