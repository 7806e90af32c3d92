"""What an adapter is called: everything that changes what it computes, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvrelay.connector.adapters import Adapter, Adapters
from kvrelay.errors import ConfigError
from kvrelay.identity.adapters import adapter_digest, adapter_stamp
from kvrelay.identity.digests import DigestCache

if TYPE_CHECKING:
    from pathlib import Path


def make(folder: Path, weights: bytes = b"weights", config: str = '{"r": 8}') -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "adapter_config.json").write_text(config)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> DigestCache:
    return DigestCache(tmp_path / "digests.json")


@pytest.fixture
def adapters(cache: DigestCache) -> Adapters:
    return Adapters(cache)


def asked(folder: Path, number: int = 1, name: str = "sql", **more: object) -> Adapter:
    return Adapter(name, number, str(folder), **more)  # type: ignore[arg-type]


class TestDigest:
    def test_equal_files_give_equal_digests_wherever_they_are(self, tmp_path: Path, cache: DigestCache) -> None:
        one, other = make(tmp_path / "one"), make(tmp_path / "other")
        (other / "README.md").write_text("not weights")
        assert adapter_digest(one, cache) == adapter_digest(other, cache)

    @pytest.mark.parametrize("changes", [{"weights": b"Weights"}, {"config": '{"r": 8, "lora_alpha": 16}'}])
    def test_other_weights_or_another_scaling_is_another_adapter(
        self, tmp_path: Path, cache: DigestCache, changes: dict[str, str]
    ) -> None:
        assert adapter_digest(make(tmp_path / "one"), cache) != adapter_digest(make(tmp_path / "two", **changes), cache)  # type: ignore[arg-type]

    def test_a_stamp_changes_with_any_file(self, tmp_path: Path) -> None:
        folder = make(tmp_path / "one")
        before = adapter_stamp(folder)
        assert adapter_stamp(folder) == before
        (folder / "adapter_model.safetensors").write_bytes(b"Weights")
        assert adapter_stamp(folder) != before

    @pytest.mark.parametrize("name", ["empty", "missing"])
    def test_a_folder_without_an_adapter_is_an_error_that_names_it(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "empty").mkdir()
        with pytest.raises(ConfigError, match=f"no adapter in .*{name}"):
            adapter_stamp(tmp_path / name)


class TestIdentity:
    def test_it_is_name_and_weights_not_number_or_place(self, tmp_path: Path, adapters: Adapters) -> None:
        one, other = make(tmp_path / "one"), make(tmp_path / "other")
        same = {adapters.identity(asked(one, 1)), adapters.identity(asked(other, 2))}
        assert len(same) == 1
        assert adapters.identity(asked(one, 3, name="code")) not in same
        assert adapters.identity(asked(make(tmp_path / "third"), 4, variant="bfloat16")) not in same
        assert adapters.identity(asked(make(tmp_path / "two", b"two"), 5)) not in same

    def test_files_that_change_in_use_spoil_the_adapter_until_it_is_loaded_elsewhere(
        self, tmp_path: Path, adapters: Adapters
    ) -> None:
        folder = make(tmp_path / "one")
        adapters.loading(asked(folder))
        first = adapters.identity(asked(folder))
        make(folder, b"new weights")
        with pytest.raises(ConfigError, match="its files changed after it was loaded"):
            adapters.identity(asked(folder))
        make(folder)  # nobody knows what was read meanwhile
        with pytest.raises(ConfigError, match="under another name or from another path"):
            adapters.identity(asked(folder))
        assert adapters.stopped == [1]
        adapters.loading(asked(folder, 2))
        with pytest.raises(ConfigError, match="does not tell their KV from its: load it under another name"):
            adapters.identity(asked(folder, 2))
        adapters.loading(asked(make(tmp_path / "elsewhere"), 3))
        assert adapters.identity(asked(tmp_path / "elsewhere", 3)) == first

    def test_files_that_changed_between_loading_and_the_first_use_are_noticed(
        self, tmp_path: Path, adapters: Adapters
    ) -> None:
        """1. The engine reads the files. 2. They are replaced. 3. The first request comes."""
        folder = make(tmp_path / "one")
        adapters.loading(asked(folder))
        make(folder, b"new weights")
        with pytest.raises(ConfigError, match="its files changed"):
            adapters.identity(asked(folder))

    def test_an_adapter_loaded_in_place_has_no_identity_and_its_requests_are_to_be_forgotten(
        self, tmp_path: Path, adapters: Adapters
    ) -> None:
        folder = make(tmp_path / "one")
        adapters.loading(asked(folder))
        adapters.identity(asked(folder))
        assert adapters.stopped == []
        adapters.loading(asked(folder, in_place=True))
        assert adapters.stopped == [1]
        for again in (asked(folder), asked(folder, in_place=True)):
            with pytest.raises(ConfigError, match="in place"):
                adapters.identity(again)

    def test_an_engine_told_again_to_load_what_it_has_changes_nothing(self, tmp_path: Path, adapters: Adapters) -> None:
        folder = make(tmp_path / "one")
        adapters.loading(asked(folder))
        adapters.loading(asked(folder))
        assert adapters.identity(asked(folder))
        assert adapters.stopped == []

    def test_one_number_for_two_adapters_is_noticed(self, tmp_path: Path, adapters: Adapters) -> None:
        adapters.loading(asked(make(tmp_path / "one")))
        with pytest.raises(ConfigError, match="its files changed"):
            adapters.identity(asked(make(tmp_path / "two", b"two"), name="other"))

    def test_an_adapter_that_is_not_there_is_an_error(self, tmp_path: Path, adapters: Adapters) -> None:
        adapters.loading(asked(tmp_path / "gone"))
        with pytest.raises(ConfigError, match="no adapter in"):
            adapters.identity(asked(tmp_path / "gone"))

    def test_the_folder_of_an_adapter_that_is_named_otherwise_is_asked_for(
        self, tmp_path: Path, cache: DigestCache
    ) -> None:
        adapters = Adapters(cache, {"org/sql": str(make(tmp_path / "one"))}.__getitem__)
        assert adapters.identity(Adapter("sql", 1, "org/sql")).startswith("3:sql:")


class TestPlaces:
    """Numbers of one name and path, which the engine's own prefix cache does not tell apart."""

    def test_other_weights_have_no_identity_where_others_ran_and_nor_have_those_that_did(
        self, tmp_path: Path, adapters: Adapters
    ) -> None:
        """1. It is used. 2. It is unloaded, its files rewritten, and loaded again. 3. The old files come back."""
        folder = make(tmp_path / "one")
        for number, weights in enumerate([b"weights", b"new weights", b"weights"], 1):
            make(folder, weights)
            adapters.loading(asked(folder, number))
            adapters.use(asked(folder, number))
            if number == 1:
                adapters.identity(asked(folder, number))
                continue
            with pytest.raises(ConfigError, match="reset the engine's prefix cache"):
                adapters.identity(asked(folder, number))
        assert adapters.stopped == [1, 1, 2]

    def test_the_same_weights_go_on(self, tmp_path: Path, adapters: Adapters) -> None:
        names = set()
        for number in (1, 2, 3):
            folder = make(tmp_path / "one")
            adapters.loading(asked(folder, number))
            adapters.use(asked(folder, number))
            names.add(adapters.identity(asked(folder, number)))
        assert len(names) == 1

    def test_what_was_loaded_and_never_ran_is_in_nobodys_way(self, tmp_path: Path, adapters: Adapters) -> None:
        folder = make(tmp_path / "one", b"a mistake")
        adapters.loading(asked(folder))
        make(folder)
        adapters.loading(asked(folder, 2))
        adapters.use(asked(folder, 2))
        assert adapters.identity(asked(folder, 2))

    def test_what_ran_without_ever_being_identified_is_taken_for_other_weights(
        self, tmp_path: Path, adapters: Adapters
    ) -> None:
        folder = make(tmp_path / "one")
        adapters.use(asked(folder))
        adapters.use(asked(folder, 2))
        with pytest.raises(ConfigError, match="other weights ran"):
            adapters.identity(asked(folder, 2))
        adapters.use(asked(folder, 3, in_place=True))
        adapters.use(asked(folder, 4, name="other"))
        assert adapters.identity(asked(folder, 4, name="other"))

    def test_when_the_prefix_cache_was_dropped_only_what_still_runs_counts(
        self, tmp_path: Path, adapters: Adapters
    ) -> None:
        folder = make(tmp_path / "one")
        adapters.use(asked(folder))
        adapters.identity(asked(folder))
        make(folder, b"new weights")
        adapters.use(asked(folder, 2))
        adapters.cache_dropped({1, 2})
        with pytest.raises(ConfigError, match="other weights ran"):
            adapters.identity(asked(folder, 2))
        adapters.cache_dropped({2})
        assert adapters.identity(asked(folder, 2))
