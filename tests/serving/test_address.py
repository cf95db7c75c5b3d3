"""Addresses that no server can listen on."""

import pytest

from ebft.errors import ConfigError
from ebft.serving.keys import base_url, check_free, host_in, is_loopback
from tests.serving.processes import free_port


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost", "::1", ""])
def test_a_free_port(host):
    check_free(host, free_port())


@pytest.mark.parametrize("host", ["192.0.2.77", "no-such-host.invalid", "a..b", "a" * 70])
def test_an_address_of_another_machine(host):
    with pytest.raises(ConfigError, match=f"cannot listen on {host}.*Set vllm.host to an address of this"):
        check_free(host, free_port())


LOCAL = {"127.0.0.1:7860": "127.0.0.1", "LOCALHOST.:80": "localhost", "[::1]:7860": "::1", "[::1]": "::1"}
LOCAL |= {"127.1.2.3": "127.1.2.3"}
OTHERS = {"127.0.0.1.example.org:80": "127.0.0.1.example.org"}
OTHERS |= {host: host for host in ("localhost.example.org", "localhost@example.org", "2130706433", "")}


def test_hosts_of_requests_and_addresses_for_clients():
    for header, host in (LOCAL | OTHERS).items():
        assert host_in(header) == host and is_loopback(host) == (header in LOCAL), header
    urls = {"::1": "http://[::1]:80", "::": "http://[::1]:80", "0.0.0.0": "http://127.0.0.1:80"}
    for host, url in (urls | {"": "http://127.0.0.1:80"}).items():
        assert base_url(host, 80) == url
