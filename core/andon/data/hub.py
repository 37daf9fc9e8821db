"""Model names that are not local folders: looked up on the hub once, before a library retries again and again."""

from __future__ import annotations

from pathlib import Path

from andon.console.messages import command_line
from andon.console.problems import InputError, Problem

_ANSWER_S = 10.0


def at_hand(base: str, revision: str | None = None) -> str:
    """The folder of the model `base` on this machine: itself, or its folder in the hub's cache at `revision`.

    For a name from a run folder, which may be from anybody: nothing is downloaded for it. Raises `InputError` if the
    model is not on this machine.
    """
    from huggingface_hub import snapshot_download

    if Path(base).expanduser().is_dir():
        return base
    try:
        return snapshot_download(base, revision=revision, local_files_only=True)
    except Exception as error:  # a name that can be none, or a cache without it
        what = f"the base {base!r} is no folder here"
        if Path(base).is_absolute():
            what += "; if it has moved, name its place: --model PATH, in eval, predict, generate and export"
        else:
            fetch = ("hf", "download", base, *(() if revision is None else ("--revision", revision)))
            what += f" and not in the hub's cache; fetch it first: {command_line(*fetch)}"
        raise InputError([Problem("model.base", what)]) from error


def require_on_hub(name: str, revision: str | None = None) -> None:
    """Raise `InputError` if `name` is not a valid hub id, is unknown there at `revision`, or the hub is unreachable.

    A model whose configuration is in the hub's cache passes without a request.
    """
    from huggingface_hub import HfApi, errors, try_to_load_from_cache

    if Path(name).exists():
        raise InputError([Problem("model.base", f"{name!r} is a file; give the model's folder")])
    at = "" if revision is None else f" at revision {revision!r}"
    try:
        if not isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            HfApi().model_info(name, revision=revision, timeout=_ANSWER_S)
        return
    except errors.HFValidationError:
        why = "the name can be no hub id, which is NAME or OWNER/NAME"
    except errors.OfflineModeIsEnabled:
        why = f"no model of that name{at} in the hub's cache (HF_HUB_OFFLINE forbids to ask the hub)"
    except errors.GatedRepoError:
        return  # it is there; loading it says what access it needs
    except errors.RepositoryNotFoundError:
        why = "the hub has no model of that name that you may see"
    except errors.RevisionNotFoundError:
        why = f"the hub has the model of that name, but not{at}"
    except errors.HfHubHTTPError:
        return  # the hub answers otherwise; loading tries again where that may help
    except Exception as error:  # noqa: BLE001 - of whichever HTTP library the hub's client uses
        why = f"the hub could not be reached ({type(error).__name__}: {error})"
    raise InputError([Problem("model.base", f"there is no folder {name!r} here, and {why}")])
