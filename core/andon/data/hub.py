"""Locates a model: a local folder, or a hub id, which is requested once before a library starts its retries."""

from __future__ import annotations

import os
from pathlib import Path

from andon.config.source import is_folder
from andon.console.messages import InputError, command_line, did_you_mean

_ANSWER_S = 10.0


def at_hand(base: str, revision: str | None = None) -> str:
    """The local folder of the model `base`: `base` itself, or its snapshot at `revision` in the hub's cache.

    Downloads nothing: `base` may be from an untrusted run folder. Raises `InputError` if the model is not on this
    machine.
    """
    from huggingface_hub import snapshot_download

    if Path(base).expanduser().is_dir():
        return base
    try:
        return snapshot_download(base, revision=revision, local_files_only=True)
    except Exception as error:  # an invalid name, or not in the cache
        what = f"the base {base!r} is not a local folder"
        if Path(base).is_absolute():
            what += "; if it has moved, name its place: --model PATH, in eval, predict, generate and export"
        else:
            fetch = ("hf", "download", base, *(() if revision is None else ("--revision", revision)))
            what += f" and not in the hub's cache; fetch it first: {command_line(*fetch)}"
        raise InputError.at("model.base", what) from error


def require_found(name: str, revision: str | None = None) -> None:
    """Raise `InputError` unless `name` is a folder, or a model that exists on the hub at `revision`.

    A model whose configuration is in the hub's cache passes without a request.
    """
    from huggingface_hub import HfApi, errors, try_to_load_from_cache

    if is_folder(Path(name)):
        return
    beside, own = os.path.split(os.path.expanduser(name))
    models = [each.parent.name for each in Path(beside).glob("*/config.json")]
    near = did_you_mean(own, models).replace("'", f"'{beside or '.'}/", 1)
    if name.startswith((".", "/", "~")):
        raise InputError.at("model.base", f"folder {name!r} does not exist{near}")
    if Path(name).exists():
        raise InputError.at("model.base", f"{name!r} is a file; give the model's folder")
    at = "" if revision is None else f" at revision {revision!r}"
    try:
        if not isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            HfApi().model_info(name, revision=revision, timeout=_ANSWER_S)
        return
    except errors.HFValidationError:
        why = "the name can be no hub id, which is NAME or OWNER/NAME"
    except errors.OfflineModeIsEnabled:
        why = f"no model of that name{at} in the hub's cache (HF_HUB_OFFLINE is set, so the hub was not asked)"
    except errors.GatedRepoError:
        return  # it exists; loading it reports the access that it needs
    except errors.RepositoryNotFoundError:
        why = "the hub has no model of that name that you may see"
    except errors.RevisionNotFoundError:
        why = f"the hub has the model of that name, but not{at}"
    except errors.HfHubHTTPError:
        return  # other HTTP errors: loading retries those that may be transient
    except Exception as error:  # noqa: BLE001 - the hub client's HTTP library varies
        why = f"the hub could not be reached ({type(error).__name__}: {error})"
    raise InputError.at("model.base", f"{name!r} is not a local folder, and {why}{near}")
