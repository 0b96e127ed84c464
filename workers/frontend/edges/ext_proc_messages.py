"""Messages of Envoy's external processing: as many of their fields as are read or written here, under Envoy's names.

The packages that have all of them bring top-level modules that clash with other libraries' (`google`, `test`,
`opentelemetry.proto`). So their descriptors are made here, by the fields' numbers, which never change. A field that
is not here is passed over, as protobuf does. A real Envoy is spoken to in `make test-gateway`.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

SERVICE, METHOD = "envoy.service.ext_proc.v3.ExternalProcessor", "Process"
#: Of `ProcessingMode.BodySendMode`, and of `HeaderValueOption.HeaderAppendAction`.
FULL_DUPLEX_STREAMED, OVERWRITE_IF_EXISTS_OR_ADD = 4, 2

#: Message: field: its number, and its type; "[]": several. An enum is an int, and a map is its entries.
FIELDS: dict[str, dict[str, tuple[int, str]]] = {
    "ProcessingRequest": {
        "request_headers": (2, "HttpHeaders"),
        "response_headers": (3, "HttpHeaders"),
        "request_body": (4, "HttpBody"),
        "response_body": (5, "HttpBody"),
        "request_trailers": (6, "HttpTrailers"),
        "response_trailers": (7, "HttpTrailers"),
        "metadata_context": (8, "Metadata"),
        "protocol_config": (11, "ProtocolConfiguration"),
    },
    "ProtocolConfiguration": {"request_body_mode": (1, "int"), "response_body_mode": (2, "int")},
    "HttpHeaders": {"headers": (1, "HeaderMap"), "end_of_stream": (3, "bool")},
    "HttpBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "HttpTrailers": {"trailers": (1, "HeaderMap")},
    "HeaderMap": {"headers": (1, "[]HeaderValue")},
    "HeaderValue": {"key": (1, "str"), "value": (2, "str"), "raw_value": (3, "bytes")},
    "Metadata": {"filter_metadata": (1, "[]FilterMetadataEntry")},
    "FilterMetadataEntry": {"key": (1, "str"), "value": (2, "Struct")},
    "ProcessingResponse": {
        "request_headers": (1, "HeadersResponse"),
        "response_headers": (2, "HeadersResponse"),
        "request_body": (3, "BodyResponse"),
        "response_body": (4, "BodyResponse"),
        "request_trailers": (5, "TrailersResponse"),
        "response_trailers": (6, "TrailersResponse"),
        "immediate_response": (7, "ImmediateResponse"),
        "dynamic_metadata": (8, "Struct"),
    },
    "HeadersResponse": {"response": (1, "CommonResponse")},
    "BodyResponse": {"response": (1, "CommonResponse")},
    "TrailersResponse": {},
    "CommonResponse": {"header_mutation": (2, "HeaderMutation"), "body_mutation": (3, "BodyMutation")},
    "HeaderMutation": {"set_headers": (1, "[]HeaderValueOption"), "remove_headers": (2, "[]str")},
    "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, "int")},
    "BodyMutation": {"streamed_response": (3, "StreamedBodyResponse")},
    "StreamedBodyResponse": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "ImmediateResponse": {
        "status": (1, "HttpStatus"),
        "headers": (2, "HeaderMutation"),
        "body": (3, "bytes"),
    },
    "HttpStatus": {"code": (1, "int")},
}
_PACKAGE = "halfmoon.ext_proc"
_Field = descriptor_pb2.FieldDescriptorProto
_TYPES = {
    "str": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
    "bool": _Field.TYPE_BOOL,
    "int": _Field.TYPE_INT32,
}


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="ext_proc.proto", package=_PACKAGE, syntax="proto3")
    file.dependency.append(struct_pb2.DESCRIPTOR.name)
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            one = kind.removeprefix("[]")
            added = message.field.add(
                name=field,
                number=number,
                label=_Field.LABEL_OPTIONAL if one == kind else _Field.LABEL_REPEATED,
                type=_TYPES.get(one, _Field.TYPE_MESSAGE),
            )
            if one not in _TYPES:
                package = "google.protobuf" if one == "Struct" else _PACKAGE
                added.type_name = f".{package}.{one}"
    # A pool of its own: the process may have Envoy's in the common one.
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    made = [f"{_PACKAGE}.{name}" for name in FIELDS] + ["google.protobuf.Struct"]
    found = {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(name)) for name in made}
    return {name.rpartition(".")[2]: kind for name, kind in found.items()}


_made = _classes()
ProcessingRequest, ProcessingResponse = _made["ProcessingRequest"], _made["ProcessingResponse"]
HeadersResponse, BodyResponse = _made["HeadersResponse"], _made["BodyResponse"]
TrailersResponse, ImmediateResponse = _made["TrailersResponse"], _made["ImmediateResponse"]
CommonResponse, HeaderMutation = _made["CommonResponse"], _made["HeaderMutation"]
HeaderValue, HeaderValueOption = _made["HeaderValue"], _made["HeaderValueOption"]
BodyMutation, StreamedBodyResponse = _made["BodyMutation"], _made["StreamedBodyResponse"]
HttpStatus, Struct = _made["HttpStatus"], _made["Struct"]
#: Of a request, exactly one is set.
_KINDS = (
    "request_headers",
    "request_body",
    "request_trailers",
    "response_headers",
    "response_body",
    "response_trailers",
)


def kind_of(message: Any) -> str:
    """The part of an HTTP exchange that a `ProcessingRequest` has; "": none that is known here."""
    return next((kind for kind in _KINDS if message.HasField(kind)), "")
