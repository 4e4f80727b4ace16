"""Files of a dataset on the Hugging Face hub, at one commit: ``hf://datasets/owner/name[@revision]/path-glob``.

Needs the extra ``hf``. huggingface_hub itself reads the endpoint (HF_ENDPOINT) and the token (HF_TOKEN), and does not
fetch again what a killed download left whole; here the commit is pinned first, and each file is checked by its size
and, where the hub has one, its SHA-256.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from steps.cluster import HUB_SECRET
from steps.documents import TextFile, supported
from steps.progress import ByteProgress
from steps.sources import Address, directory_name, listing_digest, nothing_supported
from trainer.errors import ConfigurationError, DataError, DeniedError, UnavailableError
from trainer.records import file_sha256

ADDRESS = re.compile(r"^datasets/(?P<repository>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?(/(?P<glob>.*))?$")
SECONDS = 30.0
TOKEN = f"HF_TOKEN (on a cluster the key 'token' of secret {HUB_SECRET})"
TRANSPORTS = ("requests", "urllib3", "httpx", "httpx2", "httpcore", "httpcore2")
"""What huggingface_hub speaks HTTP with, by version; their errors have no common class."""


@dataclass(frozen=True)
class HubFile:
    name: str
    size: int
    sha256: str
    """Empty for a small file that the hub keeps in git."""


class HubSource:
    """The files of a dataset that a glob names (``*`` within a folder, ``**`` across folders; nothing: all of them)."""

    def __init__(self, address: Address) -> None:
        match = ADDRESS.match(address.rest)
        if not match:
            raise ConfigurationError(
                f"--dataset-uri: '{address.uri}' is not hf://datasets/owner/name[@revision]/path-glob"
            )
        self._repository, self._uri = match["repository"], address.uri
        with _translated(address.uri):
            self._commit, files = _listing(self._repository, match["revision"])
        self._found = [file for file in files if supported(file.name) and matches(file.name, match["glob"] or "")]
        if not self._found:
            raise nothing_supported(address.uri)
        self.name = directory_name(self._repository.partition("/")[2])
        self.files = len(self._found)
        self.size = self.fetch_size = sum(file.size for file in self._found)
        names = listing_digest(file.name for file in self._found)
        self.revision = f"{self._repository} at commit {self._commit}, {self.files} files named sha256:{names}"

    def fetch(self, staging: Path, progress: ByteProgress) -> list[TextFile]:
        found = []
        for file in self._found:
            path = self._download(file, staging)
            if problem := _problem(path, file):
                path.unlink()
                path = self._download(file, staging)
                problem = _problem(path, file)
                if problem:
                    path.unlink()
                    raise DataError(
                        f"{self._uri}: {file.name}: {problem}, twice in a row; report it to the dataset's owner"
                    )
            progress.advance(file.size)
            found.append(TextFile(path, f"hf://datasets/{self._repository}/{file.name}", file.size))
        return found

    def check_unchanged(self) -> None:
        return  # a commit does not change

    def _download(self, file: HubFile, staging: Path) -> Path:
        import huggingface_hub
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
        with _translated(f"{self._uri}: {file.name}"):
            path = huggingface_hub.hf_hub_download(
                self._repository, file.name, repo_type="dataset", revision=self._commit, local_dir=staging
            )
        return Path(path)


def matches(name: str, glob: str) -> bool:
    """Whether the file ``name`` is what ``glob`` names: itself, a folder above it, or a pattern it fits."""
    glob = glob.strip("/")
    if not glob or glob == name or PurePosixPath(glob) in PurePosixPath(name).parents:
        return True
    translated = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", glob)
    return re.fullmatch("".join(translated.get(part, re.escape(part)) for part in parts), name) is not None


def _listing(repository: str, revision: str | None) -> tuple[str, list[HubFile]]:
    import huggingface_hub

    info = huggingface_hub.HfApi().dataset_info(repository, revision=revision, files_metadata=True, timeout=SECONDS)
    if not info.sha:
        raise UnavailableError(f"the hub does not say which commit {repository} is at; run again")
    files = [
        HubFile(item.rfilename, item.size or 0, (item.lfs.sha256 if item.lfs else "") or "")
        for item in info.siblings or []
    ]
    return info.sha, sorted(files, key=lambda file: file.name)


def _problem(path: Path, file: HubFile) -> str:
    size = path.stat().st_size
    if size != file.size:
        return f"{size} bytes arrived of {file.size}"
    if file.sha256 and file_sha256(path) != file.sha256:
        return "its content does not agree with the hub's SHA-256"
    return ""


@contextmanager
def _translated(where: str) -> Iterator[None]:
    """Errors of huggingface_hub as ours, in one line."""
    try:
        from huggingface_hub import errors as hub
    except ImportError:
        raise ConfigurationError(f"{where}: the hub needs the extra 'hf': pip install 'holdfast[hf]'") from None
    try:
        yield
    except hub.GatedRepoError:
        raise DeniedError(f"{where}: the dataset is gated; accept its terms on the hub and give {TOKEN}") from None
    except hub.RepositoryNotFoundError:
        raise ConfigurationError(f"{where}: no such dataset, or a private one that {TOKEN} may not read") from None
    except hub.RevisionNotFoundError:
        raise ConfigurationError(f"{where}: the dataset has no such revision") from None
    except hub.HFValidationError as error:
        raise ConfigurationError(f"{where}: {' '.join(str(error).split())}") from None
    except hub.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise DeniedError(
                f"{where}: the hub denies access ({status}); {TOKEN} must be one that may read it"
            ) from None
        raise UnavailableError(f"{where}: the hub answered {status}; run again") from None
    except (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled) as error:
        raise _unreachable(where, error) from None
    except Exception as error:
        short = isinstance(error, OSError) and error.errno is None  # fewer bytes came than the hub had said
        if short or type(error).__module__.partition(".")[0] in TRANSPORTS:
            raise _unreachable(where, error) from None
        raise


def _unreachable(where: str, error: Exception) -> UnavailableError:
    return UnavailableError(f"{where}: the hub does not answer ({str(error).splitlines()[0]}); run again")
