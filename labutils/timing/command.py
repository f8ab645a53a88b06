"""``labutils predict``: a prediction from the command line."""

from __future__ import annotations

import argparse
import json

from .predict import PRECISIONS, STRATEGIES, Prediction, predict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``lab.predict``, with dashes."""
    whole, number = {"type": int, "metavar": "N"}, {"type": float, "metavar": "MIB"}
    parser.add_argument("--model", required=True, help="name of a model, e.g. resnet50")
    parser.add_argument("--batch", default=32, help="per GPU; of all GPUs for dp", **whole)  # type: ignore[arg-type]
    parser.add_argument("--strategy", default="ddp", help=", ".join(STRATEGIES))
    parser.add_argument("--gpus", default=1, help="per node", **whole)  # type: ignore[arg-type]
    parser.add_argument("--nodes", default=1, **whole)  # type: ignore[arg-type]
    parser.add_argument(
        "--profile", default="A100-SXM4-80GB", help="a system, a kind of GPU, or a TOML file"
    )
    parser.add_argument("--fabric", help="between the nodes; the system's own by default")
    parser.add_argument("--precision", default="fp32", help=", ".join(PRECISIONS))
    parser.add_argument("--bucket-cap-mb", default=25, **number)  # type: ignore[arg-type]
    parser.add_argument("--first-bucket-mb", default=1, **number)  # type: ignore[arg-type]
    parser.add_argument("--gradient-as-bucket-view", action="store_true")
    parser.add_argument("--find-unused-parameters", action="store_true")
    parser.add_argument("--accumulate", default=1, help="passes per step", **whole)  # type: ignore[arg-type]
    parser.add_argument("--loader", help="seconds per batch, or e.g. 1200/s in samples")
    parser.add_argument("--seq", help="tokens per sample of a language model", **whole)  # type: ignore[arg-type]
    parser.add_argument("--trace", help="write the step's trace to this file, for Perfetto")
    parser.add_argument("--json", action="store_true", help="print the whole prediction as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Predict and print; 0 also where the batch does not fit, which the output says."""
    asked = vars(arguments)
    asked = {k: v for k, v in asked.items() if k not in ("command", "json", "trace")}
    prediction = predict(**asked)
    if arguments.trace:
        _save(prediction, arguments.trace)
    print(json.dumps(prediction.as_dict(), indent=2) if arguments.json else table(prediction))
    return 0


def _save(prediction: Prediction, path: str) -> None:
    try:
        prediction.trace.save(path)
    except OSError as error:
        why = error.strerror or str(error)
        raise ValueError(f"The trace cannot be written to {path!r}: {why}.") from None


def table(prediction: Prediction) -> str:
    """The prediction in plain text."""
    rows = [
        ("step", f"{prediction.step_s * 1e3:.2f} ms"),
        ("speed", f"{prediction.samples_per_s:,.1f} samples/s"),
        ("efficiency", f"{prediction.efficiency:.1%}"),
        ("exposed communication", f"{prediction.exposed_communication_s * 1e3:.2f} ms"),
    ]
    rows += [(k, f"{v / 2**20:,.1f} MiB") for k, v in prediction.memory_bytes.items()]
    rows.append(("fits", "yes" if prediction.fits else "no"))
    return "\n".join([f"{k:<22}{v:>20}" for k, v in rows] + prediction.notes)
