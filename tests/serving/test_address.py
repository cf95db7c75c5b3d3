"""Addresses that no server can listen on."""

import pytest

from ebft.errors import ConfigError
from ebft.serving.address import check_free
from tests.serving.processes import free_port


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_free_port(host):
    check_free(host, free_port())


@pytest.mark.parametrize("host", ["192.0.2.77", "no-such-host.invalid"])
def test_an_address_of_another_machine(host):
    with pytest.raises(ConfigError, match=f"cannot listen on {host}.*Set vllm.host to an address of this"):
        check_free(host, free_port())
