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
    __slots__ = ("step", "samples", "epoch", "step_s", "wait_s", "pinned_cpus", "stepped_s", "waited_s")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    PINNED_CPUS_FIELD_NUMBER: _ClassVar[int]
    STEPPED_S_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    step: int
    samples: int
    epoch: int
    step_s: float
    wait_s: float
    pinned_cpus: int
    stepped_s: float
    waited_s: float
    def __init__(self, step: _Optional[int] = ..., samples: _Optional[int] = ..., epoch: _Optional[int] = ..., step_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., pinned_cpus: _Optional[int] = ..., stepped_s: _Optional[float] = ..., waited_s: _Optional[float] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("number", "warmup_steps", "steps", "longest_s", "read_s", "readers")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WARMUP_STEPS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LONGEST_S_FIELD_NUMBER: _ClassVar[int]
    READ_S_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    number: int
    warmup_steps: int
    steps: int
    longest_s: float
    read_s: float
    readers: int
    def __init__(self, number: _Optional[int] = ..., warmup_steps: _Optional[int] = ..., steps: _Optional[int] = ..., longest_s: _Optional[float] = ..., read_s: _Optional[float] = ..., readers: _Optional[int] = ...) -> None: ...

class Measured(_message.Message):
    __slots__ = ("probe", "steps", "samples_per_s", "waits_known", "wait_share", "busy_samples_per_s", "data")
    PROBE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_S_FIELD_NUMBER: _ClassVar[int]
    WAITS_KNOWN_FIELD_NUMBER: _ClassVar[int]
    WAIT_SHARE_FIELD_NUMBER: _ClassVar[int]
    BUSY_SAMPLES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    probe: int
    steps: int
    samples_per_s: float
    waits_known: bool
    wait_share: float
    busy_samples_per_s: float
    data: DataRead
    def __init__(self, probe: _Optional[int] = ..., steps: _Optional[int] = ..., samples_per_s: _Optional[float] = ..., waits_known: _Optional[bool] = ..., wait_share: _Optional[float] = ..., busy_samples_per_s: _Optional[float] = ..., data: _Optional[_Union[DataRead, _Mapping]] = ...) -> None: ...

class DataRead(_message.Message):
    __slots__ = ("dataset_mib", "samples", "storage_mib_s", "read_mib", "in_memory", "cached", "how")
    DATASET_MIB_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    STORAGE_MIB_S_FIELD_NUMBER: _ClassVar[int]
    READ_MIB_FIELD_NUMBER: _ClassVar[int]
    IN_MEMORY_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    HOW_FIELD_NUMBER: _ClassVar[int]
    dataset_mib: float
    samples: int
    storage_mib_s: float
    read_mib: float
    in_memory: bool
    cached: bool
    how: str
    def __init__(self, dataset_mib: _Optional[float] = ..., samples: _Optional[int] = ..., storage_mib_s: _Optional[float] = ..., read_mib: _Optional[float] = ..., in_memory: _Optional[bool] = ..., cached: _Optional[bool] = ..., how: _Optional[str] = ...) -> None: ...

class Profiling(_message.Message):
    __slots__ = ("known_probe", "measured", "own_mem_mib", "program")
    KNOWN_PROBE_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    OWN_MEM_MIB_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    known_probe: int
    measured: Measured
    own_mem_mib: int
    program: str
    def __init__(self, known_probe: _Optional[int] = ..., measured: _Optional[_Union[Measured, _Mapping]] = ..., own_mem_mib: _Optional[int] = ..., program: _Optional[str] = ...) -> None: ...

class StepTimes(_message.Message):
    __slots__ = ("local_batch", "accumulation", "replicas", "steps", "gradient_s", "step_s")
    LOCAL_BATCH_FIELD_NUMBER: _ClassVar[int]
    ACCUMULATION_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    local_batch: int
    accumulation: int
    replicas: int
    steps: int
    gradient_s: float
    step_s: float
    def __init__(self, local_batch: _Optional[int] = ..., accumulation: _Optional[int] = ..., replicas: _Optional[int] = ..., steps: _Optional[int] = ..., gradient_s: _Optional[float] = ..., step_s: _Optional[float] = ...) -> None: ...

class Training(_message.Message):
    __slots__ = ("times", "gradient_square", "gradient_variance", "initial_batch", "local_most", "progress")
    TIMES_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_SQUARE_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_VARIANCE_FIELD_NUMBER: _ClassVar[int]
    INITIAL_BATCH_FIELD_NUMBER: _ClassVar[int]
    LOCAL_MOST_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    times: _containers.RepeatedCompositeFieldContainer[StepTimes]
    gradient_square: float
    gradient_variance: float
    initial_batch: int
    local_most: int
    progress: float
    def __init__(self, times: _Optional[_Iterable[_Union[StepTimes, _Mapping]]] = ..., gradient_square: _Optional[float] = ..., gradient_variance: _Optional[float] = ..., initial_batch: _Optional[int] = ..., local_most: _Optional[int] = ..., progress: _Optional[float] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("token", "task", "known_generation", "progress", "proposed_stop_step", "accepted_stop_step", "refused_stop_step", "wait_s", "known_stop", "profiling", "training")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    KNOWN_GENERATION_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_STOP_STEP_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_STOP_STEP_FIELD_NUMBER: _ClassVar[int]
    REFUSED_STOP_STEP_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    KNOWN_STOP_FIELD_NUMBER: _ClassVar[int]
    PROFILING_FIELD_NUMBER: _ClassVar[int]
    TRAINING_FIELD_NUMBER: _ClassVar[int]
    token: str
    task: TaskId
    known_generation: int
    progress: Progress
    proposed_stop_step: int
    accepted_stop_step: int
    refused_stop_step: int
    wait_s: float
    known_stop: StopStep
    profiling: Profiling
    training: Training
    def __init__(self, token: _Optional[str] = ..., task: _Optional[_Union[TaskId, _Mapping]] = ..., known_generation: _Optional[int] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., proposed_stop_step: _Optional[int] = ..., accepted_stop_step: _Optional[int] = ..., refused_stop_step: _Optional[int] = ..., wait_s: _Optional[float] = ..., known_stop: _Optional[_Union[StopStep, _Mapping]] = ..., profiling: _Optional[_Union[Profiling, _Mapping]] = ..., training: _Optional[_Union[Training, _Mapping]] = ...) -> None: ...

class LeaseReply(_message.Message):
    __slots__ = ("token", "lease", "stop_step", "gone", "over", "probe")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    STOP_STEP_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    token: str
    lease: Lease
    stop_step: StopStep
    gone: bool
    over: bool
    probe: Probe
    def __init__(self, token: _Optional[str] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ..., stop_step: _Optional[_Union[StopStep, _Mapping]] = ..., gone: _Optional[bool] = ..., over: _Optional[bool] = ..., probe: _Optional[_Union[Probe, _Mapping]] = ...) -> None: ...

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
    __slots__ = ("protocol", "credential", "nonce", "job", "body")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CREDENTIAL_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    credential: str
    nonce: str
    job: str
    body: str
    def __init__(self, protocol: _Optional[int] = ..., credential: _Optional[str] = ..., nonce: _Optional[str] = ..., job: _Optional[str] = ..., body: _Optional[str] = ...) -> None: ...

class ControlReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...
