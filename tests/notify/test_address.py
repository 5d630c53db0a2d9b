from __future__ import annotations

import pytest

from smon.config import Settings, masked_url
from smon.errors import ConfigError
from smon.notify.address import Target, refusal, target_of
from tests.notify.receiver import SECRET

SECURE = Target("hooks.example", 443, "/x", secure=True)
PLAIN = Target("hooks.example", 80, "/x", secure=False)

PUBLIC = ["93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946"]
PRIVATE = [
    *("10.0.0.1", "172.16.3.4", "192.168.1.1", "127.0.0.1", "127.8.8.8", "100.64.0.1"),
    *("::1", "fd12:3456::1", "::ffff:10.0.0.1", "::ffff:127.0.0.1", "64:ff9b::7f00:1"),
    *("2002:7f00:1::", "2001:0:4136:e378:8000:63bf:80ff:fffe"),
]
NEVER = [
    *("169.254.169.254", "168.63.129.16", "100.100.100.200", "192.0.0.192", "0.0.0.0"),  # noqa: S104
    *("224.0.0.1", "240.0.0.1", "255.255.255.255", "fe80::1%eth0", "fd00:ec2::254", "::"),
    *("ff02::1", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::", "::7f00:1"),
]


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_is_allowed(address: str) -> None:
    """Whatever its kind."""
    assert refusal(SECURE, [address], private=False) is None


@pytest.mark.parametrize("address", PRIVATE)
def test_a_private_address_needs_a_setting(address: str) -> None:
    """In whatever it is wrapped: mapped, 6to4, Teredo, NAT64."""
    assert "SMON_NOTIFY_PRIVATE" in str(refusal(SECURE, [address], private=False))
    assert refusal(SECURE, [address], private=True) is None


@pytest.mark.parametrize("address", NEVER)
def test_some_addresses_are_never_allowed(address: str) -> None:
    """No receiver lies there, but a cloud may tell secrets there."""
    assert refusal(SECURE, [address], private=True) is not None
    assert refusal(SECURE, [address], private=False) is not None


def test_one_bad_address_among_good_ones_is_enough() -> None:
    """A name that leads here and there is not trusted."""
    assert refusal(SECURE, [*PUBLIC, "10.0.0.1"], private=False) is not None
    assert refusal(SECURE, [], private=True) is not None


def test_http_goes_to_this_machine_only_and_only_if_allowed() -> None:
    """Everywhere else, whoever is on the way could read the message and the address."""
    assert "https" in str(refusal(PLAIN, PUBLIC, private=False))
    assert "https" in str(refusal(PLAIN, PUBLIC, private=True))
    assert "https" in str(refusal(PLAIN, ["10.0.0.1"], private=True))
    assert refusal(PLAIN, ["127.0.0.1"], private=False) is not None
    assert refusal(PLAIN, ["127.0.0.1", "::1"], private=True) is None


def test_an_address_has_its_parts() -> None:
    """Port by scheme; the query belongs to what is asked for."""
    assert target_of("https://h.example/a/b?c=d") == Target(
        "h.example", 443, "/a/b?c=d", secure=True
    )
    assert target_of("http://127.0.0.1:9/") == Target("127.0.0.1", 9, "/", secure=False)
    assert target_of("https://[2606:2800::1]:8443/x").name == "[2606:2800::1]:8443"
    assert target_of("https://h.example").name == "h.example"
    assert target_of("https://h.example").path == "/"


def test_a_target_does_not_print_its_secret() -> None:
    """It stands in tracebacks."""
    target = target_of(f"https://h.example/hooks/{SECRET}")
    assert SECRET not in repr(target)
    settings = Settings.from_env({"SMON_NOTIFY_SLACK_URL": f"https://h.example/{SECRET}"})
    assert SECRET not in repr(settings)
    assert settings.to_env()["SMON_NOTIFY_SLACK_URL"].endswith(SECRET)


@pytest.mark.parametrize(
    "wrong",
    [
        *("ftp://h.example/x", "h.example/x", "https://?", "https://h example/", "https:///x"),
        *("https://user:word@h.example/x", "https://h.example/x#y", "https://h.example:99999/"),
        *(
            "https://h.example/ü",
            "https://h.example/a b",
            "https://h.example\n/x",
            "https://[::g]/",
        ),
    ],
)
def test_a_setting_that_is_no_such_address_is_refused(wrong: str) -> None:
    """With one line that does not repeat it."""
    with pytest.raises(ConfigError, match="SMON_NOTIFY_WEBHOOK_URL: expected https") as caught:
        Settings.from_env({"SMON_NOTIFY_WEBHOOK_URL": wrong})
    assert wrong not in str(caught.value)


def test_a_secret_address_is_shown_without_its_path() -> None:
    """Enough to see which it is."""
    assert masked_url(f"https://hooks.slack.com/services/{SECRET}") == "https://hooks.slack.com/***"
    assert masked_url("https://h.example:8443") == "https://h.example:8443/***"
    assert masked_url("nonsense") == "***"
