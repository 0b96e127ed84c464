"""The cluster's certificate authority, and its certificates: EC keys on P-256, in PEM."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from halfmoon.bus.addresses import is_address
from halfmoon.bus.credentials import write_private

DAYS = 3650
_SIGNS = x509.KeyUsage(
    key_cert_sign=True,
    crl_sign=True,
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    encipher_only=False,
    decipher_only=False,
)
#: A certificate is good a little before it was made: clocks of two machines differ.
_BEFORE = datetime.timedelta(minutes=5)


def make_authority(key_file: Path, certificate_file: Path) -> None:
    """Raises OSError."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("halfmoon")
    builder = _builder(name, name, key.public_key(), key.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    builder = builder.add_extension(_SIGNS, critical=True)
    write_private(certificate_file, _pem(builder.sign(key, hashes.SHA256())))
    write_private(key_file, _key_pem(key))


def make_certificate(
    host: str, key_file: Path, certificate_file: Path, *, authority_key: Path, authority: Path
) -> None:
    """Make a certificate for a server of that host name or address, and for its clients at localhost.

    Raises OSError; ValueError when the authority's files are broken.
    """
    issuer = x509.load_pem_x509_certificate(authority.read_bytes())
    signer = serialization.load_pem_private_key(authority_key.read_bytes(), password=None)
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{authority_key}: no key on an elliptic curve")
    key = ec.generate_private_key(ec.SECP256R1())
    own = x509.IPAddress(ipaddress.ip_address(host)) if is_address(host) else x509.DNSName(host)
    names = [own, x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    builder = _builder(_name(host), issuer.subject, key.public_key(), signer.public_key())
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    write_private(key_file, _key_pem(key))
    write_private(certificate_file, _pem(builder.sign(signer, hashes.SHA256())))


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    issuer_key: ec.EllipticCurvePublicKey,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        # By these two, checkers find the issuer; strict ones ask for them.
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
