from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TaskId(_message.Message):
    __slots__ = ("job_id", "restart_count", "rank", "ranks", "local_rank", "local_ranks", "node")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    RESTART_COUNT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANKS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    restart_count: int
    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    node: str
    def __init__(self, job_id: _Optional[int] = ..., restart_count: _Optional[int] = ..., rank: _Optional[int] = ..., ranks: _Optional[int] = ..., local_rank: _Optional[int] = ..., local_ranks: _Optional[int] = ..., node: _Optional[str] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("protocol", "task", "credential", "nonce", "os_cpus", "step_id")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    CREDENTIAL_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    OS_CPUS_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    task: TaskId
    credential: str
    nonce: str
    os_cpus: _containers.RepeatedScalarFieldContainer[int]
    step_id: int
    def __init__(self, protocol: _Optional[int] = ..., task: _Optional[_Union[TaskId, _Mapping]] = ..., credential: _Optional[str] = ..., nonce: _Optional[str] = ..., os_cpus: _Optional[_Iterable[int]] = ..., step_id: _Optional[int] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("generation", "expires_in_s", "cores", "floor_cores", "mem_mib", "floor_mem_mib", "stop", "stop_within_s", "node_cores", "batch_size", "grace_s")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    FLOOR_CORES_FIELD_NUMBER: _ClassVar[int]
    MEM_MIB_FIELD_NUMBER: _ClassVar[int]
    FLOOR_MEM_MIB_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    NODE_CORES_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    generation: int
    expires_in_s: float
    cores: _containers.RepeatedScalarFieldContainer[int]
    floor_cores: _containers.RepeatedScalarFieldContainer[int]
    mem_mib: int
    floor_mem_mib: int
    stop: bool
    stop_within_s: float
    node_cores: int
    batch_size: int
    grace_s: float
    def __init__(self, generation: _Optional[int] = ..., expires_in_s: _Optional[float] = ..., cores: _Optional[_Iterable[int]] = ..., floor_cores: _Optional[_Iterable[int]] = ..., mem_mib: _Optional[int] = ..., floor_mem_mib: _Optional[int] = ..., stop: _Optional[bool] = ..., stop_within_s: _Optional[float] = ..., node_cores: _Optional[int] = ..., batch_size: _Optional[int] = ..., grace_s: _Optional[float] = ...) -> None: ...

class StopStep(_message.Message):
    __slots__ = ("step", "committed")
    STEP_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    step: int
    committed: bool
    def __init__(self, step: _Optional[int] = ..., committed: _Optional[bool] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("step", "samples", "epoch", "step_s", "wait_s", "pinned_cpus")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    PINNED_CPUS_FIELD_NUMBER: _ClassVar[int]
    step: int
    samples: int
    epoch: int
    step_s: float
    wait_s: float
    pinned_cpus: int
    def __init__(self, step: _Optional[int] = ..., samples: _Optional[int] = ..., epoch: _Optional[int] = ..., step_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., pinned_cpus: _Optional[int] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("token", "task", "known_generation", "progress", "proposed_stop_step", "accepted_stop_step", "refused_stop_step", "wait_s", "known_stop")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    KNOWN_GENERATION_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_STOP_STEP_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_STOP_STEP_FIELD_NUMBER: _ClassVar[int]
    REFUSED_STOP_STEP_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    KNOWN_STOP_FIELD_NUMBER: _ClassVar[int]
    token: str
    task: TaskId
    known_generation: int
    progress: Progress
    proposed_stop_step: int
    accepted_stop_step: int
    refused_stop_step: int
    wait_s: float
    known_stop: StopStep
    def __init__(self, token: _Optional[str] = ..., task: _Optional[_Union[TaskId, _Mapping]] = ..., known_generation: _Optional[int] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., proposed_stop_step: _Optional[int] = ..., accepted_stop_step: _Optional[int] = ..., refused_stop_step: _Optional[int] = ..., wait_s: _Optional[float] = ..., known_stop: _Optional[_Union[StopStep, _Mapping]] = ...) -> None: ...

class LeaseReply(_message.Message):
    __slots__ = ("token", "lease", "stop_step", "gone", "over")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    STOP_STEP_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    token: str
    lease: Lease
    stop_step: StopStep
    gone: bool
    over: bool
    def __init__(self, token: _Optional[str] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ..., stop_step: _Optional[_Union[StopStep, _Mapping]] = ..., gone: _Optional[bool] = ..., over: _Optional[bool] = ...) -> None: ...

class FinishRequest(_message.Message):
    __slots__ = ("token", "task", "exit_code", "checkpointed", "step", "samples")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    token: str
    task: TaskId
    exit_code: int
    checkpointed: bool
    step: int
    samples: int
    def __init__(self, token: _Optional[str] = ..., task: _Optional[_Union[TaskId, _Mapping]] = ..., exit_code: _Optional[int] = ..., checkpointed: _Optional[bool] = ..., step: _Optional[int] = ..., samples: _Optional[int] = ...) -> None: ...

class FinishReply(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: _Optional[bool] = ...) -> None: ...

class ControlRequest(_message.Message):
    __slots__ = ("protocol", "credential", "nonce", "job")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CREDENTIAL_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    credential: str
    nonce: str
    job: str
    def __init__(self, protocol: _Optional[int] = ..., credential: _Optional[str] = ..., nonce: _Optional[str] = ..., job: _Optional[str] = ...) -> None: ...

class ControlReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...
