"""finessl train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from finessl.cli import app

Text = str | None
Plugins = Annotated[
    list[str] | None,
    typer.Option("--plugin", help="Python file or module that registers methods, tunings, … of your own; repeatable."),
]
DATA_HELP = (
    "A folder labeled/CLASS/… with unlabeled/… (and test/CLASS/…); a class folder CLASS/… or train/CLASS, test/CLASS "
    "with --labels-per-class; a CSV with path,label (empty label: unlabeled); or a data set's name (finessl list)."
)
PATH_COLUMN_HELP = "Column of a table with the image files. (default: path)"
LABEL_COLUMN_HELP = "Column of a table with the labels. (default: label)"


@app.command(no_args_is_help=True)
def train(
    data: Annotated[str, typer.Argument(help=DATA_HELP, show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Run directory. The same command again resumes it.")] = None,
    recipe: Annotated[
        Text, typer.Option(help="Recipe file, or the name of a shipped one (finessl list recipes).")
    ] = None,
    root: Annotated[Text, typer.Option(help="Folder containing the named data set.")] = None,
    download: Annotated[bool, typer.Option("--download", help="Fetch a named data set into --root first.")] = False,
    path_column: Annotated[Text, typer.Option(help=PATH_COLUMN_HELP)] = None,
    label_column: Annotated[Text, typer.Option(help=LABEL_COLUMN_HELP)] = None,
    test: Annotated[Text, typer.Option(help="Folder or table of labeled images to test on.")] = None,
    labels: Annotated[
        Text, typer.Option(help="Table with the columns path and label, such as the filled-in list of finessl select.")
    ] = None,
    labels_per_class: Annotated[
        int | None,
        typer.Option("--labels-per-class", "-n", help="Keep N labels per class and treat the rest as unlabeled."),
    ] = None,
    split: Annotated[
        Text, typer.Option(help="How labels are chosen, or a saved split file (finessl list splits).")
    ] = None,
    method: Annotated[Text, typer.Option(help="Learning method (finessl list methods). (default: finessl)")] = None,
    tuning: Annotated[Text, typer.Option(help="Tuning strategy (finessl list tunings). (default: vpt-deep)")] = None,
    backbone: Annotated[
        Text, typer.Option(help="Alias (finessl list backbones) or any timm name. (default: clip-vit-b16)")
    ] = None,
    weights: Annotated[
        Text,
        typer.Option(help="The backbone's weights (safetensors/pt; timm, OpenAI or HF CLIP keys); else timm's hub."),
    ] = None,
    head: Annotated[Text, typer.Option(help="Classifier (finessl list heads). (default: cosine)")] = None,
    head_init: Annotated[Text, typer.Option(help="Initial head: random, class-mean, probe or text.")] = None,
    text_features: Annotated[
        Text, typer.Option(help="FILE.npy with the class names' text features, instead of a text tower.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps. (default: 15000)")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Labeled images per step. (default: 32)")] = None,
    mu: Annotated[int | None, typer.Option(help="Unlabeled images per labeled one. (default: 1)")] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate. (default: 0.03; full tuning: at most 1e-4 in the backbone)")
    ] = None,
    image_size: Annotated[int | None, typer.Option(help="Pixels at the input. (default: the backbone's)")] = None,
    strong_views: Annotated[int | None, typer.Option(help="Strong views per unlabeled image. (default: 2)")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the split, the initial weights and the views. (default: 0)")
    ] = None,
    precision: Annotated[
        Text, typer.Option(help="auto, fp32, bf16, fp16 or fp8 (bf16, and frozen layers in fp8).")
    ] = None,
    cache_features: Annotated[
        int | None, typer.Option(help="With --tuning linear: pre-compute N random draws of each view. (default: 0)")
    ] = None,
    strict: Annotated[
        bool | None, typer.Option("--strict", help="Refuse broken images instead of skipping them.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Any recipe field: --set method.alpha=4 --set data.strong.ops=3")
    ] = None,
    plugin: Plugins = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")] = "auto",
    compile_: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="torch.compile. (default: on a GPU, for long runs)")
    ] = None,
    eval_every: Annotated[
        int | None,
        typer.Option(help="Steps between evaluations; 0: only at the end. (default: about ten evaluations)"),
    ] = None,
    checkpoint_seconds: Annotated[float, typer.Option(help="Maximum seconds between checkpoints.")] = 120.0,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Folder for decoded images that do not fit into memory.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
) -> None:
    """Train a classifier from a few labels and a pile of images."""
    from finessl.api import make_recipe
    from finessl.recipe import parse_setting
    from finessl.training.loop import Settings
    from finessl.training.loop import train as run

    settings = Settings(
        device=device,
        compile=compile_,
        eval_every=eval_every,
        checkpoint_seconds=checkpoint_seconds,
        cache_dir=cache_dir,
        quiet=quiet,
    )
    fields: dict[str, Any] = dict(
        root=root, download=download or None, path_column=path_column, label_column=label_column, test=test, labels=labels,
        labels_per_class=labels_per_class, split=split,
        method=method, tuning=tuning, backbone=backbone, weights=weights, head=head, head_init=head_init,
        text_features=text_features, steps=steps, batch_size=batch_size, mu=mu, lr=lr, image_size=image_size,
        strong_views=strong_views, seed=seed, precision=precision, strict=strict,
        cache_features=cache_features,
    )  # fmt: skip
    more = {"data.source": data, **dict(map(parse_setting, set_ or []))}
    made = make_recipe(recipe, fields, more, plugins=plugin or (), source=True)
    folder = out or default_out(data, made.method.name, made.seed)
    meta = run(made, folder, settings)
    if meta and not quiet:
        show_summary(folder, meta)


def default_out(data: str, method: str, seed: int) -> Path:
    return Path("runs") / f"{Path(data).stem or Path(data).resolve().name or 'data'}-{method}-s{seed}"


def show_summary(folder: Path, meta: dict[str, Any]) -> None:
    import shlex

    from rich.table import Table

    from finessl.runtime.terminal import console

    table = Table(title=str(folder), show_header=False, title_justify="left")
    if meta.get("accuracy") is not None:
        table.add_row("test accuracy", f"{meta['accuracy']:.2%} of {meta['test']:,} images, last step")
    if meta.get("pseudo_accuracy") is not None:
        table.add_row("pseudo-label accuracy", f"{meta['pseudo_accuracy']:.2%} (last epoch)")
    table.add_row("used with / without label", f"{meta['labeled']:,} / {meta['unlabeled']:,} images")
    table.add_row("trained parameters", f"{meta['trained_parameters']:,} of {meta['parameters']:,}")
    table.add_row("time", f"{meta['seconds']:,.0f} s on {meta['device']}")
    table.add_row("use it", f"finessl predict {shlex.quote(str(folder))} IMAGES…")
    console().print(table)
