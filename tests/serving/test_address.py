"""Addresses that no server can listen on."""

import pytest

from ebft.errors import ConfigError
from ebft.serving.keys import base_url, check_free
from tests.serving.processes import free_port


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost", "::1", ""])
def test_a_free_port(host):
    check_free(host, free_port())


@pytest.mark.parametrize("host", ["192.0.2.77", "no-such-host.invalid", "a..b", "a" * 70])
def test_an_address_of_another_machine(host):
    with pytest.raises(ConfigError, match=f"cannot listen on {host}.*Set vllm.host to an address of this"):
        check_free(host, free_port())


def test_addresses_for_clients():
    urls = {"::1": "http://[::1]:80", "::": "http://[::1]:80", "0.0.0.0": "http://127.0.0.1:80"}
    for host, url in (urls | {"": "http://127.0.0.1:80"}).items():
        assert base_url(host, 80) == url
