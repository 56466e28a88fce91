# SPDX-License-Identifier: Apache-2.0
import contextlib
import re
import tomllib
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tierd import config
from tierd.config import Config, Engine, Mode, PolicyConfig, Rival
from tierd.config.check import check, named, parse_document
from tierd.config.lines import find_lines
from tierd.config.rules import ARRAYS, TABLES, Rule
from tierd.config.show import as_toml
from tierd.config.values import PolicyName
from tierd.errors import ConfigError, Problem
from tierd.model import Pin, Policy, TenantClass, TierKind

SHIPPED = Path(__file__).parents[2] / "systemd/tierd.toml"

FULL = """\
[daemon]
interval_s = 2
state_dir = "/srv/tierd"

[damon]
sample_us = 5000
aggregation_us = 100_000
take_over = true

[policy]
mode = "observe"
hysteresis = 2
headroom_percent = 5

[migrate]
budget_mbps = 64

[[tier]]
name = "near"
kind = "dram"
nodes = [0, 2]

[[tier]]
name = "far"
kind = "cxl"
nodes = [1]
latency_ns = 250
bandwidth_mbps = 20000

[[target]]
pid = 42

[[target]]
command = "fifteen-letters"

[[target]]
cgroup = "/system.slice/"
"""


def problems(content: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        config.parse(content, "f")
    return caught.value.problems


def only_problem(content: str) -> str:
    found = problems(content)
    assert len(found) == 1, found
    return str(found[0])


def test_empty_file_is_the_defaults() -> None:
    assert config.parse("", "f") == Config()


def test_a_named_policy_gives_what_is_not_set() -> None:
    read = config.parse('[policy]\nname = "latency"\npayback = 3\n', "f").policy
    assert (read.placement.short_s, read.placement.payback) == (0.5, 3.0)
    assert config.parse('[policy]\nname = "observe"\n', "f").policy.mode is Mode.OBSERVE


def test_a_policy_can_be_put_on_top_of_another() -> None:
    base = parse_document('[policy]\nname = "capacity"\ndwell_s = 1\nretry_s = 3\n', "f")
    read = check([base, named(PolicyName.BALANCED)]).config.policy
    assert read == PolicyConfig(placement=Policy(retry_s=3.0))


def test_tenants_are_read() -> None:
    content = (
        '[[tenant]]\ncgroup = "/db/"\nclass = "latency"\nweight = 200\n'
        "guaranteed_mib = { dram = 512 }\n"
        'maximum_mib = { dram = 1024.5 }\n[[tenant]]\ncgroup = "/batch"\n'
    )
    db, batch = config.parse(content, "f").tenants
    assert (db.cgroup, db.weight, db.guaranteed_mib, db.maximum_mib) == (
        *("/db", 200.0),
        *({"dram": 512.0}, {"dram": 1024.5}),
    )
    assert (db.class_, batch.class_) == (TenantClass.LATENCY, TenantClass.NORMAL)
    assert (batch.weight, batch.guaranteed_mib, batch.maximum_mib) == (100.0, {}, {})


def test_bandwidth_is_by_kind_of_tier() -> None:
    content = (
        '[arena]\nfar_mbps = { rdma = 1000 }\n[[tenant]]\ncgroup = "/a"\n'
        "far_mbps = { swap = 5.5, rdma = 1000 }\n"
    )
    read = config.parse(content, "f")
    assert read.arena.far_mbps == {TierKind.RDMA: 1000.0}
    assert read.tenants[0].far_mbps == {TierKind.SWAP: 5.5, TierKind.RDMA: 1000.0}
    assert config.parse(as_toml(read, {}), "f").arena == read.arena
    assert Config().arena.far_mbps == {}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[[tenant]]\nweight = 5\n", "f:1: tenant[1]: cgroup is missing"),
        ('[[tenant]]\ncgroup = "db"\n', "f:2: tenant[1].cgroup: must be a cgroup below the root"),
        ('[[tenant]]\ncgroup = "/a"\nweight = 0\n', "f:3: tenant[1].weight: must be from 1 to"),
        (
            '[[tenant]]\ncgroup = "/a"\nguaranteed_mib = 5\n',
            "f:3: tenant[1].guaranteed_mib: must be a table of sizes by tier, such as",
        ),
        (
            '[[tenant]]\ncgroup = "/a"\nguaranteed_mib = { dram = -1 }\n',
            "f:3: tenant[1].guaranteed_mib: must be sizes by tier, each named and from 0 to",
        ),
        (
            '[[tenant]]\ncgroup = "/a"\nguaranteed_mib = { dram = 8 }\n'
            "maximum_mib = { dram = 7 }\n",
            "f:4: tenant[1].maximum_mib: dram must not be below what is guaranteed, 8",
        ),
        (
            '[[tenant]]\ncgroup = "/a"\n[[tenant]]\ncgroup = "/a/"\n',
            "f:4: tenant[2].cgroup: another tenant has /a too",
        ),
        ('[[tenant]]\ncgroup = "/a"\nwieght = 5\n', "did you mean weight?"),
        (
            '[[tenant]]\ncgroup = "/a"\nclass = "fast"\n',
            'f:3: tenant[1].class: must be one of "latency", "normal", "batch"; it is "fast"',
        ),
    ],
)
def test_a_wrong_tenant_is_told(content: str, problem: str) -> None:
    assert problem in only_problem(content)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            "[arena]\nfar_mbps = 1000\n",
            "f:2: arena.far_mbps: must be a table of MiB a second by kind of tier, such as "
            "{ rdma = 1000 }; it is 1000",
        ),
        (
            "[arena]\nfar_mbps = { cxl = 1000 }\n",
            'f:2: arena.far_mbps: must be by kind of tier, one of "rdma", "swap"; it is '
            "{'cxl': 1000}",
        ),
        (
            "[arena]\nfar_mbps = { swap = 10, rdma = -1 }\n",
            "f:2: arena.far_mbps: must be MiB a second, from 1 to 1e+06; it is ",
        ),
        (
            "[arena.far_mbps]\nrdma = 'all'\n",
            "f:1: arena.far_mbps: must be MiB a second, a number from 1 to 1e+06; it is ",
        ),
        (
            '[[tenant]]\ncgroup = "/a"\nfar_mbps = { rdma = nan }\n',
            "f:3: tenant[1].far_mbps: must be MiB a second, from 1 to 1e+06; it is ",
        ),
        (
            '[[tenant]]\ncgroup = "/a"\nfar_mbps = { swap = 7, rdma = 12 }\n'
            "[arena]\nfar_mbps = { rdma = 10 }\n",
            "f:3: tenant[1].far_mbps: rdma must not be above arena.far_mbps, which is 10",
        ),
    ],
)
def test_a_bandwidth_that_cannot_be_is_told(content: str, problem: str) -> None:
    assert only_problem(content).startswith(problem)


def test_pins_of_mappings_are_read() -> None:
    content = '[[target]]\npid = 42\npin = { "[heap]" = "fastest", "/srv/a b" = "here" }\n'
    read = config.parse(content, "f")
    assert read.targets[0].pin == {"[heap]": Pin.FASTEST, "/srv/a b": Pin.HERE}
    again = config.parse(as_toml(read, {}), "f")
    assert again.targets[0].pin == read.targets[0].pin


@pytest.mark.parametrize(
    ("pin", "problem"),
    [
        ("{}", "must be a table of 1 to 64 mappings, such as"),
        ('"fastest"', "must be a table of 1 to 64 mappings, such as"),
        ('{ heap = "here" }', "must be mappings named as in /proc/PID/maps: a path, [heap]"),
        ('{ "[vdso]" = "here" }', "must be mappings named as in /proc/PID/maps"),
        ('{ "/a\\nb" = "here" }', "must be mappings named as in /proc/PID/maps"),
        ('{ "[heap]" = "up" }', 'must be mappings, each pinned as one of "fastest", "here"'),
        (
            "{" + ", ".join(f'"/{number}" = "here"' for number in range(65)) + "}",
            "must be a table of 1 to 64 mappings, such as",
        ),
    ],
)
def test_a_wrong_pin_is_told(pin: str, problem: str) -> None:
    told = only_problem(f'[[target]]\ncommand = "redis"\npin = {pin}\n')
    assert told.startswith(f"f:3: target[1].pin: {problem}")


def test_a_pin_alone_is_no_target() -> None:
    told = only_problem('[[target]]\npin = { "[heap]" = "here" }\n')
    assert "must have a pid, or one or more of command" in told


def test_every_table_is_read() -> None:
    read = config.parse(FULL, "f")
    assert read.daemon.interval_s == 2.0
    assert read.daemon.state_dir == Path("/srv/tierd")
    assert read.damon.sample_us == 5000
    assert read.damon.take_over
    assert read.policy.mode is Mode.OBSERVE
    assert read.policy.headroom_percent == 5.0
    assert read.policy.placement == Policy(hysteresis=2.0)
    assert read.migrate.budget_mbps == 64.0
    near, far = read.tiers
    assert (near.name, near.kind, near.nodes, near.latency_ns) == (
        "near",
        TierKind.DRAM,
        (0, 2),
        None,
    )
    assert (far.latency_ns, far.bandwidth_mbps, far.place.line) == (250, 20000, 26)
    pid, command, cgroup = read.targets
    assert (pid.pid, pid.command, pid.cgroup) == (42, None, None)
    assert command.command == "fifteen-letters"
    assert cgroup.cgroup == "/system.slice"
    assert str(cgroup.place.problem("is gone")) == "f:37: target[3].cgroup: is gone"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            "[daemon]\nintervall_s = 1",
            "f:2: daemon.intervall_s: unknown key; did you mean interval_s?",
        ),
        ("[demon]\n", "f:1: demon: unknown key; did you mean daemon?"),
        (
            "[damon]\nzzz = 1",
            "f:2: damon.zzz: unknown key; known are sample_us, aggregation_us, "
            "min_regions, max_regions, cpu_percent, zoom, take_over",
        ),
        ("[daemon]\ninterval_s = 0", "f:2: daemon.interval_s: must be from 0.1 to 60; it is 0"),
        ("[daemon]\ninterval_s = nan", "f:2: daemon.interval_s: must be from 0.1 to 60; it is nan"),
        (
            "[daemon]\ninterval_s = true",
            "f:2: daemon.interval_s: must be a number from 0.1 to 60; it is true",
        ),
        (
            "[daemon]\nstate_dir = 'here'",
            'f:2: daemon.state_dir: must be an absolute path; it is "here"',
        ),
        (
            "[damon]\nmin_regions = 2.5",
            "f:2: damon.min_regions: must be a whole number from 3 to 10000; it is 2.5",
        ),
        (
            "[damon]\nmin_regions = true",
            "f:2: damon.min_regions: must be a whole number from 3 to 10000; it is true",
        ),
        (
            f"[damon]\nmin_regions = 0x{'f' * 4000}",
            "f:2: damon.min_regions: must be from 3 to 10000; it is larger than any number here",
        ),
        ("[damon]\ntake_over = 'yes'", 'f:2: damon.take_over: must be true or false; it is "yes"'),
        (
            "[policy]\nmode = 'move'",
            'f:2: policy.mode: must be one of "place", "observe"; it is "move"',
        ),
        (
            "[policy]\nmode = ['place']",
            'f:2: policy.mode: must be one of "place", "observe"; it is [\'place\']',
        ),
        ("daemon = 1", "f:1: daemon: must be a table, [daemon]"),
        ("tier = 1", "f:1: tier: must be tables, each headed [[tier]]"),
        ("tier = [1]", "f:1: tier: must be tables, each headed [[tier]]"),
        ("[target]\npid = 1", "f:1: target: must be tables, each headed [[target]]"),
        ("[[tier]]\nname = 'a'\nkind = 'dram'", "f:1: tier[1]: nodes is missing"),
        (
            "[[tier]]\nname = 'A b'\nkind = 'dram'\nnodes = [0]",
            "f:2: tier[1].name: must be a name of a-z, 0-9, - and _ that begins with a letter, "
            'at most 32 long; it is "A b"',
        ),
        (
            "[[tier]]\nname = 'a'\nkind = 'hbm'\nnodes = [0]",
            'f:3: tier[1].kind: must be one of "dram", "cxl"; it is "hbm"',
        ),
        (
            "[[tier]]\nname = 'a'\nkind = 'dram'\nnodes = [-1]",
            "f:4: tier[1].nodes: must be a list of node numbers such as [1, 2]; it is [-1]",
        ),
        (
            "[[tier]]\nname = 'a'\nkind = 'dram'\nnodes = []",
            "f:4: tier[1].nodes: must be a list of node numbers such as [1, 2]; it is []",
        ),
        (
            "[[tier]]\nname = 'a'\nkind = 'dram'\nnodes = [0, 0]",
            "f:4: tier[1].nodes: node 0 is already in tier a",
        ),
        ("[[target]]\npid = 0", "f:2: target[1].pid: must be from 1 to 4194304; it is 0"),
        (
            "[[target]]",
            "f:1: target[1]: must have a pid, or one or more of command, cgroup, unit, container, "
            "user",
        ),
        (
            "[[target]]\npid = 1\ncommand = 'a'",
            "f:1: target[1]: must have a pid, or one or more of command, cgroup, unit, container, "
            "user",
        ),
        (
            "[[target]]\nunit = 'redis'",
            "f:2: target[1].unit: must be a systemd unit with its suffix, such as "
            '"redis-server.service"; it is "redis"',
        ),
        (
            "[[target]]\ncontainer = '3F4A'",
            "f:2: target[1].container: must be the first 12 to 64 digits of a container's id, "
            'in lower case; it is "3F4A"',
        ),
        (
            "[[target]]\nuser = '-x'",
            'f:2: target[1].user: must be a user\'s name, or number as in "1000"; it is "-x"',
        ),
        (
            "[[target]]\ncommand = 'postgres-checkpointer'",
            "f:2: target[1].command: must be at most 15 bytes, all that the kernel keeps: "
            '"postgres-checkp"; it is "postgres-checkpointer"',
        ),
        (
            "[[target]]\ncommand = 1",
            "f:2: target[1].command: must be a command's name as in /proc/PID/comm; it is 1",
        ),
        (
            f"[[target]]\ncommand = '{'x' * 50}'",
            "f:2: target[1].command: must be at most 15 bytes, all that the kernel keeps: "
            f'"{"x" * 15}"; it is "{"x" * 36}...',
        ),
        (
            "[[target]]\ncgroup = 'a'",
            "f:2: target[1].cgroup: must be a cgroup below the root, such as "
            '"/system.slice/redis.service"; it is "a"',
        ),
        ("[policy]\nshort_s = 20", "f:1: policy.long_s: must be above short_s, which is 20"),
        (
            "[policy]\nretry_s = 700",
            "f:1: policy.retry_most_s: must not be below retry_s, which is 700",
        ),
        (
            "[damon]\nsample_us = 100000",
            "f:1: damon.aggregation_us: must be 5 times sample_us (100000) or more, "
            "or heat is not told",
        ),
        (
            "[damon]\nmax_regions = 199",
            "f:2: damon.max_regions: must be twice min_regions (100) or more, "
            "or no region is split",
        ),
        ("a = ", "f:1: is not TOML: Invalid value"),
        ("a = 1\na = 2", "f:2: is not TOML: Cannot overwrite a value"),
        ("x = " + "[" * 5000, "f: is not TOML: nested too deeply"),
        ("x = " + "1" * 5000, "f: is not TOML: Exceeds the limit (4300 digits)"),
    ],
)
def test_one_problem(content: str, problem: str) -> None:
    assert only_problem(content).startswith(problem)


DAMOS = '[migrate]\nengine = "damos"\n'


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            '[[tenant]]\ncgroup = "/a"\nguaranteed_mib = { dram = 8 }\n',
            'f:5: tenant[1].guaranteed_mib: engine "damos" keeps no shares: take engine = '
            '"move_pages" in [migrate], or leave this out',
        ),
        (
            '[[tenant]]\ncgroup = "/a"\nmaximum_mib = { dram = 8 }\n',
            'f:5: tenant[1].maximum_mib: engine "damos" keeps no shares',
        ),
        (
            '[[tenant]]\ncgroup = "/a"\nclass = "batch"\n',
            'f:5: tenant[1].class: engine "damos" keeps no shares',
        ),
        (
            '[[target]]\npid = 7\npin = { "[heap]" = "fastest" }\n',
            'f:5: target[1].pin: engine "damos" knows no pins',
        ),
        (
            "".join(f"[[tier]]\nname = 't{n}'\nkind = 'dram'\nnodes = [{n}]\n" for n in range(3)),
            'f:11: tier[3]: engine "damos" has two tiers at most',
        ),
        (
            "[[tier]]\nname = 'a'\nkind = 'dram'\nnodes = [0, 1]\n",
            'f:6: tier[1].nodes: engine "damos" has one node a tier',
        ),
        (
            '[conflicts]\nnuma_balancing = "cooperate"\n',
            'f:4: conflicts.numa_balancing: engine "damos" moves by itself',
        ),
        (
            "demote_cache = true\n",
            'f:3: migrate.demote_cache: engine "damos" doesn\'t tell what lacks room',
        ),
    ],
)
def test_what_damos_cannot_do_is_refused(content: str, problem: str) -> None:
    assert only_problem(DAMOS + content).startswith(problem)
    content = f"[migrate]\n{content}" if content.startswith("demote") else content
    assert config.parse(content, "f").migrate.engine is Engine.MOVE_PAGES


COOPERATE = '[conflicts]\nnuma_balancing = "cooperate"\n'


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            '[[tenant]]\ncgroup = "/a"\nguaranteed_mib = { dram = 5 }\n',
            'f:5: tenant[1].guaranteed_mib: numa_balancing "cooperate" keeps no shares: take',
        ),
        (
            '[[target]]\npid = 7\npin = { "[heap]" = "fastest" }\n',
            'f:5: target[1].pin: numa_balancing "cooperate" knows no pins: take another, or',
        ),
    ],
)
def test_what_nobody_can_promise_beside_the_kernel_is_refused(content: str, problem: str) -> None:
    assert only_problem(COOPERATE + content).startswith(problem)
    assert config.parse(content, "f").conflicts.numa_balancing is Rival.OBSERVE


def test_damos_goes_with_tenants_of_a_weight() -> None:
    found = config.parse(DAMOS + '[[tenant]]\ncgroup = "/a"\nweight = 5\n', "f")
    assert found.migrate.engine is Engine.DAMOS


def test_all_problems_are_told_at_once_in_the_order_of_the_file() -> None:
    content = FULL.replace("interval_s = 2", "interval_s = 'x'").replace("pid = 42", "pid = -1")
    content = content.replace("nodes = [1]", "nodes = [2]").replace("[migrate]", "[migrat]")
    assert [(problem.line, problem.key) for problem in problems(content)] == [
        (2, "daemon.interval_s"),
        (15, "migrat"),
        (26, "tier[2].nodes"),
        (31, "target[1].pid"),
    ]


def test_two_tiers_of_one_name() -> None:
    content = FULL.replace('"far"', '"near"')
    assert only_problem(content) == "f:24: tier[2].name: another tier is named near too"


def test_more_tiers_than_fit() -> None:
    tables = [f"[[tier]]\nname = 't{n}'\nkind = 'dram'\nnodes = [{n}]\n" for n in range(9)]
    assert only_problem("".join(tables)) == "f:33: tier[9]: at most 8 tiers"
    assert len(config.parse("".join(tables[:8]), "f").tiers) == 8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a" * (config.LARGEST_BYTES + 1), ": is larger than 64 KiB"),
        (b"a = 1\nb = '\xff'", ":2: is not UTF-8 text"),
    ],
)
def test_file_of_bad_bytes(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "tierd.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(f"{path}{message}")):
        config.load(path)


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: No such file or directory"):
        config.load(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory"):
        config.load(tmp_path)


def test_load_reads_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tierd.toml"
    path.write_text(FULL)
    assert config.load(path).daemon.interval_s == 2.0


LINED = '''\
# comment
top = 1
text = """
[daemon]
interval_s = 1
"""
list = [
  1, # ]
  { a = 1 },
]
dotted.key = 1

"quoted [[x]]" = 2
[table] # [other]
  a.b = { c = 1 }
[[tier]]
[[tier]]
name = "x"
[tier.inside]
k = 1
[[tier.deep]]
k = 1
[[tier.deep]]
k = 1
[[tier]]
[[tier.deep]]
k = 1
'''


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_lines_of_every_kind_of_statement(newline: str) -> None:
    assert find_lines(LINED.replace("\n", newline)) == {
        ("top",): 2,
        ("text",): 3,
        ("list",): 7,
        ("list", 0): 7,
        ("list", 1): 7,
        ("list", 1, "a"): 7,
        ("dotted",): 11,
        ("dotted", "key"): 11,
        ("quoted [[x]]",): 13,
        ("table",): 14,
        ("table", "a"): 15,
        ("table", "a", "b"): 15,
        ("table", "a", "b", "c"): 15,
        ("tier", 0): 16,
        ("tier", 1): 17,
        ("tier", 1, "name"): 18,
        ("tier", 1, "inside"): 19,
        ("tier", 1, "inside", "k"): 20,
        ("tier", 1, "deep", 0): 21,
        ("tier", 1, "deep", 0, "k"): 22,
        ("tier", 1, "deep", 1): 23,
        ("tier", 1, "deep", 1, "k"): 24,
        ("tier", 2): 25,
        ("tier", 2, "deep", 0): 26,
        ("tier", 2, "deep", 0, "k"): 27,
    }


def test_lines_end_at_an_endless_statement() -> None:
    content = "a = 1\nb = [" + "\n" * 300 + "]\nc = 1"
    assert find_lines(content) == {("a",): 1}


def test_every_lined_key_is_in_the_document() -> None:
    document = tomllib.loads(LINED)
    for key in find_lines(LINED):
        value: Any = document
        for part in key:
            value = value[part]


TOKENS = st.lists(
    st.sampled_from(
        ["[daemon]", "[[tier]]", "[[target]]", "[policy]", "interval_s", "pid", "nodes", "name",
         "=", "[", "]", "{", "}", '"""', "'", "#", ".", ",", "\n", "1", "-0x", "nan", "true",
         "1979-05-27", "\r\n", " ", "\x00"]
    ),
    max_size=40,
)  # fmt: skip


@given(st.text(max_size=200) | TOKENS.map("".join) | TOKENS.map("\n".join))
@example("a=0x" + "f" * 5000)
@example("[[tier]]\n" * 300)
@settings(deadline=None)
def test_any_text_is_a_config_or_a_config_error(content: str) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(config.parse(content, "f"), Config)


def uncommented() -> str:
    """The shipped file with each key and table switched on, less the words of the comments."""
    lines = SHIPPED.read_text().splitlines()
    return "\n".join(
        line.removeprefix("# ") for line in lines if re.match(r"(# )?\[|# \w+ = ", line)
    )


def test_shipped_file_observes_and_changes_nothing_else() -> None:
    observing = replace(Config().policy, mode=Mode.OBSERVE)
    assert config.load(SHIPPED) == replace(Config(), policy=observing)


def test_shipped_file_names_every_key_with_its_default() -> None:
    content = uncommented()
    read, default = config.parse(content, "f"), Config()
    assert (
        read.daemon,
        read.conflicts,
        read.discover,
        read.damon,
        read.policy,
        read.migrate,
    ) == (
        default.daemon,
        default.conflicts,
        default.discover,
        default.damon,
        default.policy,
        default.migrate,
    )
    document = tomllib.loads(content)
    for name, rules in TABLES.items():
        assert document[name].keys() == rules.keys()
    for name, rules in ARRAYS.items():
        assert {key for table in document[name] for key in table} == rules.keys()


@pytest.mark.parametrize(
    ("table", "parts"),
    [
        ("daemon", [config.DaemonConfig]),
        ("conflicts", [config.ConflictsConfig]),
        ("discover", [config.DiscoverConfig]),
        ("damon", [config.DamonConfig]),
        ("policy", [config.PolicyConfig, Policy]),
        ("migrate", [config.MigrateConfig]),
    ],
)
def test_rules_and_dataclasses_have_the_same_keys(table: str, parts: list[type]) -> None:
    declared = {f.name: f for part in parts for f in fields(part)}
    declared.pop("placement", None)
    assert declared.keys() == TABLES[table].keys()
    for name, declaration in declared.items():
        assert declaration.default is not MISSING
        default = declaration.default
        TABLES[table][name](str(default) if isinstance(default, Path) else default)


def test_shipped_file_gives_each_range() -> None:
    """Each number that bounds a key stands in the comment block above it."""
    blocks = SHIPPED.read_text().replace(",", " ").split("\n\n")
    for table, rules in TABLES.items():
        for name, rule in rules.items():
            bounds = re.findall(r"from (\S+) to (\S+)", _refusal(rule))
            block = next(block for block in blocks if f"# {name} = " in block)
            for bound in (number for pair in bounds for number in pair):
                assert re.search(rf"\b{re.escape(plain(bound))}\b", block), (table, name, bound)


def _refusal(rule: Rule) -> str:
    try:
        rule(object())
    except ValueError as error:
        return str(error)
    raise AssertionError(rule)


def plain(number: str) -> str:
    return f"{float(number):.10g}"
