"""What a browser's page may ask from elsewhere, and HTTPS: off, unless the options say so."""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import ssl
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from frontend_double import MODEL

from halfmoon.cli.options import OptionInvalid
from halfmoon.cli.output import JsonLines
from halfmoon.cli.processes.frontend import _context_tokens, _tls
from halfmoon.workers.frontend.config import FrontendConfig

PAGE = "https://chat.example"
ASK = {"model": MODEL, "prompt": "Once", "max_tokens": 1}


@pytest.mark.pure
def test_a_page_of_an_allowed_origin_is_answered_and_reads_it(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        preflight = {"origin": PAGE, "access-control-request-method": "POST",
                     "access-control-request-headers": "authorization,content-type"}  # fmt: skip
        async with cluster.http.options(cluster.url + "/v1/completions", headers=preflight) as response:
            assert response.status == 204
            assert response.headers["access-control-allow-origin"] == PAGE
            assert response.headers["access-control-allow-headers"] == "authorization,content-type"
        for body in (ASK, {**ASK, "stream": True}, {**ASK, "max_tokens": 0}):
            async with cluster.http.post(
                cluster.url + "/v1/completions", json=body, headers={"origin": PAGE}
            ) as response:
                assert response.headers["access-control-allow-origin"] == PAGE
                assert "x-request-id" in response.headers["access-control-expose-headers"]
                await response.read()
        status, headers, _ = await cluster.post(
            "/v1/completions", ASK, headers={"origin": "https://other.example"}
        )
        assert (status, "access-control-allow-origin" in headers) == (403, False)

    run(scenario, allowed_origins=PAGE)


@pytest.mark.pure
def test_no_page_is_allowed_unless_the_option_says_so(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        preflight = {"origin": PAGE, "access-control-request-method": "POST"}
        async with cluster.http.options(cluster.url + "/v1/completions", headers=preflight) as response:
            assert (response.status, "access-control-allow-origin" in response.headers) == (403, False)

    run(scenario)
    with pytest.raises(ValueError, match=r"allowed_origins: .* is no origin"):
        FrontendConfig(frontend_id="f", model="m", allowed_origins="chat.example")


def certificate(directory: Path) -> tuple[Path, Path]:
    """Of localhost, signed by itself; its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    files = directory / "cert.pem", directory / "key.pem"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return files


def test_https_is_served_with_a_certificate(run: Any, tmp_path: Path) -> None:
    file, key = certificate(tmp_path)
    context = _tls(argparse.Namespace(ssl_certfile=str(file), ssl_keyfile=str(key)))

    async def scenario(cluster: Any) -> None:
        assert cluster.url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=str(file))
        url = cluster.url.replace("127.0.0.1", "localhost") + "/v1/completions"
        async with cluster.http.post(url, json=ASK, ssl=trusting) as response:
            assert (response.status, (await response.json())["choices"][0]["text"]) == (200, "Half")
        with pytest.raises(aiohttp.ClientError):
            await cluster.http.get(url.replace("https", "http"))

    run(scenario, http_tls=context)


@pytest.mark.pure
def test_options_that_do_not_fit_are_named(tmp_path: Path) -> None:
    file, key = certificate(tmp_path)
    with pytest.raises(OptionInvalid, match="--ssl-keyfile: needs --ssl-certfile"):
        _tls(argparse.Namespace(ssl_certfile="", ssl_keyfile=str(key)))
    with pytest.raises(OptionInvalid, match="--ssl-certfile"):
        _tls(argparse.Namespace(ssl_certfile=str(key), ssl_keyfile=str(file)))
    shorter = argparse.Namespace(engine="torch", model=MODEL, max_model_len=512)
    assert _context_tokens(shorter) == 512
    for tokens in (1, 10**6):
        with pytest.raises(OptionInvalid, match=rf"--max-model-len: {tokens} is not in 2\.\.8192"):
            _context_tokens(argparse.Namespace(engine="torch", model=MODEL, max_model_len=tokens))


@pytest.mark.pure
def test_a_line_of_the_log_is_an_object_with_its_exception() -> None:
    try:
        raise ValueError("no\nway")
    except ValueError:
        record = logging.LogRecord(
            "halfmoon.x", logging.WARNING, "f", 1, "%s of %d", ("one", 2), sys.exc_info()
        )
    line = JsonLines().format(record)
    told = json.loads(line)
    assert "\n" not in line
    assert (told["level"], told["logger"], told["message"]) == ("warning", "halfmoon.x", "one of 2")
    assert told["exception"].endswith("ValueError: no\nway")
    assert told["ts"].endswith("Z")
