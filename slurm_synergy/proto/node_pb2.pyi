from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeRequest(_message.Message):
    __slots__ = ("protocol", "node", "nonce", "credential", "wait_s", "known")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    CREDENTIAL_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    node: str
    nonce: str
    credential: str
    wait_s: float
    known: bytes
    def __init__(self, protocol: _Optional[int] = ..., node: _Optional[str] = ..., nonce: _Optional[str] = ..., credential: _Optional[str] = ..., wait_s: _Optional[float] = ..., known: _Optional[bytes] = ...) -> None: ...

class NodeReply(_message.Message):
    __slots__ = ("leases", "credential")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    CREDENTIAL_FIELD_NUMBER: _ClassVar[int]
    leases: bytes
    credential: str
    def __init__(self, leases: _Optional[bytes] = ..., credential: _Optional[str] = ...) -> None: ...

class NodeLeases(_message.Message):
    __slots__ = ("node", "leases", "state")
    NODE_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    node: str
    leases: _containers.RepeatedCompositeFieldContainer[NodeLease]
    state: bytes
    def __init__(self, node: _Optional[str] = ..., leases: _Optional[_Iterable[_Union[NodeLease, _Mapping]]] = ..., state: _Optional[bytes] = ...) -> None: ...

class NodeLease(_message.Message):
    __slots__ = ("job_id", "owner_uid", "restart_count", "generation", "expires_in_s", "cores", "node_cores", "mem_mib")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_UID_FIELD_NUMBER: _ClassVar[int]
    RESTART_COUNT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    NODE_CORES_FIELD_NUMBER: _ClassVar[int]
    MEM_MIB_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    owner_uid: int
    restart_count: int
    generation: int
    expires_in_s: float
    cores: _containers.RepeatedScalarFieldContainer[int]
    node_cores: int
    mem_mib: int
    def __init__(self, job_id: _Optional[int] = ..., owner_uid: _Optional[int] = ..., restart_count: _Optional[int] = ..., generation: _Optional[int] = ..., expires_in_s: _Optional[float] = ..., cores: _Optional[_Iterable[int]] = ..., node_cores: _Optional[int] = ..., mem_mib: _Optional[int] = ...) -> None: ...
