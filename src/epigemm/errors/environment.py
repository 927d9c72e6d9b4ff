"""Errors about what surrounds a call: environment variables and the on-disk store."""

from __future__ import annotations

from collections.abc import Iterable

from epigemm.errors.types import ConfigError, MissingPackageError, StoreKeyError, StorePermissionError, listed, say


def wrong_variable(name: str, text: str, form: str) -> ConfigError:
    return ConfigError(say(f"The environment variable {name} is {text!r}.", f"It must be {form}; unset it to have the default."))


def cache_not_a_folder(path: object) -> StorePermissionError:
    what = f"The cache folder {path} is not a folder."
    return StorePermissionError(say(what, "Remove it, or set EPIGEMM_CACHE_DIR to a folder of your own."))


def cache_owned_by_another(path: object, owner: int, user: int) -> StorePermissionError:
    what = f"The cache folder {path} belongs to user {owner}, not to user {user} who runs this: its kernels could be anyone's."
    return StorePermissionError(say(what, "Set EPIGEMM_CACHE_DIR to a folder of your own."))


def cache_writable_by_others(path: object, mode: int) -> StorePermissionError:
    what = f"Others can write to the cache folder {path} (mode {mode:04o}): its kernels could be anyone's."
    return StorePermissionError(say(what, f"Run `chmod 700 {path}` if its content is yours, or set EPIGEMM_CACHE_DIR."))


def not_fingerprintable(path: str, value: object) -> StoreKeyError:
    """A part of a store key that has no stable text; `path` is where it stands, as in "problem.a.dtype"."""
    what = f"The store key's part `{path}` cannot be fingerprinted: {value!r} is a {type(value).__name__}."
    return StoreKeyError(say(what, "A key is made of None, bool, int, float, str, and lists and mappings (str to value) of these."))


def key_incomplete(store: str, missing: Iterable[str]) -> StoreKeyError:
    what = f"A key of the store '{store}' lacks {listed(missing)}."
    return StoreKeyError(say(what, "What decides a stored value and is not known must not be left out: do without the store instead."))


def missing_package(what: str, package: str, extra: str) -> MissingPackageError:
    """`what` needs an optional package that one of our extras brings."""
    return MissingPackageError(say(f"{what} needs {package}, which is not installed.", f'Run `pip install "epigemm[{extra}]"`.'))
