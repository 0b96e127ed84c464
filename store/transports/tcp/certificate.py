"""TLS between processes that know one secret: both show the same certificate, whose key is drawn from that secret.

So both ends of a completed handshake know the secret, and session keys are fresh for each connection (TLS 1.3). No
authority, no file, no clock: nothing to hand out but the secret, and no date on which it ends.
"""

from __future__ import annotations

import base64
import functools
import hmac
import os
import ssl

from nacl.signing import SigningKey

_ED25519 = bytes.fromhex("06032b6570")
_COMMON_NAME = bytes.fromhex("0603550403")
#: Before the 32 bytes of a private key (PKCS #8, RFC 8410).
_PRIVATE = bytes.fromhex("302e020100300506032b657004220420")


@functools.cache
def tls_context(secret: str, server: bool, protocols: tuple[str, ...]) -> ssl.SSLContext:
    """Takes peers that know `secret`, and no others; TLS 1.3 alone. `protocols`: those of ALPN, best first."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The certificate identifies the other end, not a host name.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(protocols)
    if server:
        context.num_tickets = 0  # no session is taken up again
    key = SigningKey(hmac.digest(secret.encode(), b"halfmoon certificate", "sha256"))
    certificate = _certificate(key)
    context.load_verify_locations(cadata=certificate)
    # `ssl` reads a key from a file only; this one is memory, and gone with its descriptor.
    file = os.memfd_create("link-key", os.MFD_CLOEXEC)
    try:
        os.write(file, _pem("PRIVATE KEY", _PRIVATE + bytes(key)) + _pem("CERTIFICATE", certificate))
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return context


def _certificate(key: SigningKey) -> bytes:
    """Self-signed, DER (RFC 5280); Ed25519's signatures are the same every time, so all make the same."""
    algorithm = _der(0x30, _ED25519)
    name = _der(0x30, _der(0x31, _der(0x30, _COMMON_NAME + _der(0x0C, b"halfmoon"))))
    # To the end of time, as RFC 5280 writes it: nobody's clock matters.
    validity = _der(0x30, _der(0x17, b"700101000000Z") + _der(0x18, b"99991231235959Z"))
    public = _der(0x30, algorithm + _der(0x03, b"\0" + bytes(key.verify_key)))
    body = _der(
        0x30,
        _der(0xA0, _der(0x02, b"\2")) + _der(0x02, b"\1") + algorithm + name + validity + name + public,
    )
    return _der(0x30, body + algorithm + _der(0x03, b"\0" + key.sign(body).signature))


def _der(tag: int, content: bytes) -> bytes:
    size = len(content)
    if size < 0x80:
        return bytes([tag, size]) + content
    if size < 0x100:
        return bytes([tag, 0x81, size]) + content
    return bytes([tag, 0x82]) + size.to_bytes(2, "big") + content


def _pem(label: str, der: bytes) -> bytes:
    text = base64.encodebytes(der).decode()
    return f"-----BEGIN {label}-----\n{text}-----END {label}-----\n".encode()
