"""Invalid and valid overrides (`key=value`), checked with `ebft config --check run.yaml KEY=VALUE`."""

from tests.bad_input.cases import Case, bad, good


def broken(override: str, *expect: str) -> Case:
    return bad(override[:60], *expect, command=f"config --check run.yaml {override}")


def valid(override: str, shown: str | None = None) -> Case:
    """`shown` is the line of the output that proves how the value was read."""
    return good(override[:60], command=f"config --check run.yaml {override}", shows=(shown,) if shown else ())


CASES = [
    broken("max_steps", "max_steps", "key=value"), broken("=5", "key=value"),
    broken("--max_steps=5", "written without dashes: max_steps=5"), broken("max_steps=010", "010"),
    valid("max_steps=0x10", "max_steps: 16"), valid("max_steps=0o10", "max_steps: 8"),
    valid("max_steps=0b11", "max_steps: 3"), valid("max_steps=1_000", "max_steps: 1000"), broken("max_steps=08", "08"),
    broken("max_steps=00", "00"), broken("max_steps=-010", "010"), broken("seed=0017", "0017"),
    broken("max_steps=1:30", "1:30"), broken("max_steps=many", "max_steps"), broken("max_steps=1.0", "max_steps"),
    broken("learning_rate=1e400", "learning_rate"), broken("learning_rate=nan", "learning_rate"),
    broken("learning_rate=.nan", "learning_rate"), broken("learning_rate=1,5", "learning_rate"),
    broken("ebft.stride=four", "ebft.stride"), broken("ebft.stride.x=4", "ebft.stride"),
    broken("ebft..stride=4", "ebft..stride"), broken(".ebft=4", ".ebft"), broken("ebft.=4", "ebft."),
    broken("stride=4", "ebft.stride"), broken("datasets.1.path=a", "type"), broken("datasets.5.path=a", "datasets"),
    broken("datasets.x.path=a", "datasets"), broken("datasets.-1.path=a", "datasets"),
    broken("datasets.x=a", "datasets"), broken("datasets=a", "datasets"), broken("datasets.0=a", "datasets"),
    broken("datasets.0.path=", "path"), broken("base_model=", "base_model"),
    broken("learning_rate={a:1}", "learning_rate"), broken("ebft=[unclosed", "ebft"),
    broken("base_model=*x", "base_model"), broken("base_model=!!python/name:os.system", "base_model"),
    broken("chat_template=&a[*a]", "chat_template"), broken("max_steps=" + "9" * 5000, "max_steps"),
    broken("x" * 5000, "key=value"), broken("trust_remote_code=yes", "trust_remote_code"),
    broken("load_in_4bit=1", "load_in_4bit"), broken("seed=-1", "seed"),
    broken(".".join("a" * 2000) + "=1", "100 parts"), broken('vllm.env.A="\\ud800"', "surrogate"),
    broken("seed=!!int", "seed"), broken("seed=!!float", "seed"), broken("max_steps=9223372036854775808", "at most"),
    broken("num_epochs=1e300", "num_epochs"), broken("learning_rate=2024-01-01", "learning_rate"),
    broken("micro_batch_size=true", "micro_batch_size"), broken("<<={a:1}", "<<"), broken("a.b.c.d=1", "unknown key"),
    broken("ebft.stride.0=1", "no keys"), broken("\U0001f600=1", "unknown key"),
    valid("output_dir=\U0001f600", "output_dir"), valid("datasets.00.path=x", "'path': 'x'"),
    valid("max_steps=10", "max_steps: 10"), valid("max_steps=+5", "max_steps: 5"),
    valid("wandb_name=1:30", "wandb_name: '1:30'"), valid("warmup_steps=0", "warmup_steps: 0"),
    valid("learning_rate=1e-5", None), valid("learning_rate=0.010", "learning_rate: 0.01"),
    valid("learning_rate=.5", "learning_rate: 0.5"), valid("max_steps=", None), valid("max_steps=-1", None),
    valid("ebft.stride=8", None), valid("ebft.feature_layers=[0.5,1]", "ebft.feature_layers: [0.5, 1.0]"),
    valid("datasets.0.split=train[:2]", "train[:2]"), valid("output_dir='007'", "output_dir: '007'"),
    valid("wandb_name=2024-01-01", "wandb_name: '2024-01-01'"), valid("wandb_name=a=b", "wandb_name: 'a=b'"),
    valid("rl=", None),
]  # fmt: skip
