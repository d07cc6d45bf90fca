"""The command for prefix stores: what it prints, and what it leaves in the store."""

import io
import os
import subprocess
import sys
import time
from contextlib import closing

import pytest
import torch
from rich.console import Console

from sglang_ext import link_keys, store
from sglang_ext.managers.store_server import server
from sglang_ext.mem_cache.prefix_store.file_backend import FileBackend
from sglang_ext.mem_cache.prefix_store.object_cache import ObjectCache
from sglang_ext.mem_cache.prefix_store.objects import ObjectFormat, StoredPage, encode_object, read_page

FORMS = {form: ObjectFormat("a model", torch.bfloat16, layers=2, heads=2, head_dim=16, page_size=64, form=form) for form in ("raw", "anchored")}


@pytest.fixture
def backend(tmp_path):
    """A folder with three raw pages, the first used longest ago, and two anchored ones."""
    made = FileBackend(tmp_path / "store", 1 << 30)
    for count, (name, form) in zip((3, 2), FORMS.items()):
        for index in range(count):
            page = StoredPage(form, bytes([index]) * 32, start=64 * index)
            assert made.put(page.name, encode_object(page, kv(index)))
            os.utime(path_of(made, page.name), (1_000_000_000 + 1000 * index,) * 2)
    return made


def kv(seed):
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(4, 64, 2, 16, generator=noise).bfloat16()


def path_of(backend, name):
    namespace, _, page = name.partition("/")
    (path,) = (backend.folder / namespace).rglob(page)
    return path


def names(backend):
    return sorted(each.name for each in backend.objects())


def run(*arguments):
    """Exit code and output of the command."""
    out = io.StringIO()
    return store.main([str(each) for each in arguments], Console(file=out, width=120)), out.getvalue()


def test_namespaces_are_listed_with_pages_bytes_and_last_use(backend):
    code, text = run("list", f"file:{backend.folder}")
    assert code == 0 and "2001-09-09" in text
    rows = {line.split()[1]: line.split()[3] for line in text.splitlines() if len(line.split()) > 6 and "pages" not in line}
    assert rows == {FORMS["raw"].namespace: "3", FORMS["anchored"].namespace: "2"}


def test_damaged_pages_are_found_and_deleted_if_asked(backend):
    url, before = f"file:{backend.folder}", names(backend)
    assert run("check", url) == (0, "5 pages, 0 damaged\n")
    for name, place in zip(before, (-1, 30, 300)):
        path = path_of(backend, name)
        content = bytearray(path.read_bytes())
        content[place] ^= 1
        path.write_bytes(content)
    code, text = run("check", url)
    assert code == 1 and text.endswith("5 pages, 3 damaged\n") and all(name in text for name in before[:3]) and names(backend) == before
    assert run("check", url, "--delete")[0] == 1 and names(backend) == before[3:]
    assert run("check", url)[0] == 0


def test_pages_that_are_deleted_while_they_are_read_are_not_damaged(backend, tmp_path, monkeypatch):
    url, (first, second, *_) = f"file:{backend.folder}", names(backend)
    read, gone = FileBackend.read, [first]

    def read_after_an_eviction(self, ranges, **options):
        backend.delete(gone)
        return read(self, ranges, **options)

    monkeypatch.setattr(FileBackend, "read", read_after_an_eviction)
    assert run("check", url) == (0, "4 pages, 0 damaged; 1 were deleted during the check\n")
    gone[:] = [second]
    assert run("copy", url, f"file:{tmp_path}/other")[1].endswith("0 damaged; 1 deleted while copying\n")


def test_an_object_that_is_too_large_to_be_read_is_damaged(backend):
    with path_of(backend, names(backend)[0]).open("r+b") as file:
        file.truncate(10**10)
    code, text = run("check", f"file:{backend.folder}", "--delete")
    assert code == 1 and text.endswith("5 pages, 1 damaged and deleted\n") and len(names(backend)) == 4


def test_a_check_and_a_listing_are_no_use_of_a_page(backend):
    url, before = f"file:{backend.folder}", {each.name: each.used_at for each in backend.objects()}
    assert run("check", url)[0] == run("list", url)[0] == 0
    assert {each.name: each.used_at for each in backend.objects()} == before


def test_pages_that_were_used_least_recently_are_deleted_first(backend):
    url, form = f"file:{backend.folder}", FORMS["raw"]
    kept = sum(each.size for each in backend.objects()) - 1
    code, text = run("prune", url, "--max-gb", kept / 1e9)
    assert code == 0 and text.startswith("1 pages deleted") and len(names(backend)) == 4
    assert StoredPage(form, bytes([2]) * 32, 128).name in names(backend)
    assert run("prune", url, "--namespace", form.namespace)[0] == 0
    assert all(name.startswith(FORMS["anchored"].namespace) for name in names(backend))
    assert run("prune", url, "--older-than", 1)[0] == 0 and names(backend) == []


def test_prune_without_a_limit_deletes_nothing(backend):
    code, text = run("prune", f"file:{backend.folder}")
    assert code == 2 and "pass --max-gb" in text and len(names(backend)) == 5


def test_a_namespace_that_the_store_lacks_is_refused(backend):
    code, text = run("prune", f"file:{backend.folder}", "--namespace", "mistyped")
    assert code == 2 and "--namespace 'mistyped'" in text and "prints those that it has" in text and len(names(backend)) == 5


@pytest.mark.parametrize(("flag", "value"), [("--max-gb", -1), ("--max-gb", "nan"), ("--older-than", -1)])
def test_limits_below_zero_are_refused(backend, flag, value):
    code, text = run("prune", f"file:{backend.folder}", flag, value)
    assert code == 2 and f"{flag} {value}: pass 0 or more" in text and len(names(backend)) == 5


@pytest.mark.parametrize("arguments", [("list",), ("check",), ("prune", "--max-gb", 1), ("copy", "file:other")])
def test_a_folder_that_does_not_exist_is_refused_and_not_created(tmp_path, arguments):
    command, *rest = arguments
    code, text = run(command, f"file:{tmp_path}/mistyped", *rest)
    assert code == 2 and "there is no folder" in text and list(tmp_path.iterdir()) == []


def test_a_copy_has_the_undamaged_pages_and_keeps_its_own(backend, tmp_path):
    damaged, *rest = names(backend)
    path = path_of(backend, damaged)
    path.write_bytes(path.read_bytes()[:-1])
    target = FileBackend(tmp_path / "other", 1 << 30)
    code, text = run("copy", f"file:{backend.folder}", f"file:{target.folder}")
    assert code == 0 and text.startswith("4 pages copied") and "1 damaged" in text and names(target) == rest
    assert run("copy", f"file:{backend.folder}", f"file:{target.folder}")[1].startswith("0 pages copied")
    for form in FORMS.values():
        page, found = StoredPage(form, bytes([1]) * 32, 64), torch.empty_like(kv(1))
        if page.name in rest:
            read_page(target, page, found)
            assert torch.equal(found, kv(1))


def test_a_copy_that_fails_names_the_store_that_failed(backend, tmp_path):
    small = f"file:{tmp_path}/small?max-gb=1e-6"
    code, text = run("copy", f"file:{backend.folder}", small)
    assert code == 2 and text.startswith(f"store: {small}: object ") and str(backend.folder) not in text


def test_a_slow_copy_outlives_the_connection_of_its_listing(backend, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "SILENCE_SECONDS", 0.2)
    put = FileBackend.put
    monkeypatch.setattr(FileBackend, "put", lambda *args: time.sleep(0.2) or put(*args))
    with closing(server.StoreServer("tcp://127.0.0.1:0", ObjectCache(1 << 20, backend))) as source:
        code, text = run("copy", source.endpoint, f"file:{tmp_path}/other")
    assert code == 0 and text.startswith("5 pages copied")


def test_written_keys_are_told_for_links_and_for_stores(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["link_keys", f"{tmp_path}/keys"])
    link_keys.main()
    text = capsys.readouterr().out
    assert all(f"{use}{tmp_path}/keys" in text for use in ("--kv-link-keys ", "--keys ", "?keys="))


def test_the_commands_load_no_model_code_and_print_nothing_else(backend):
    program = (
        "import sys; from sglang_ext import link_keys, store; code = store.main(sys.argv[1:]);"
        "sys.exit(code or ' '.join({'torch', 'transformers', 'sglang', 'triton', 'numba'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program, "check", f"file:{backend.folder}"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "5 pages, 0 damaged\n", "")


@pytest.mark.parametrize("url", ["ftp://host", "file:", "redis://127.0.0.1:1/0", "tcp://127.0.0.1:1"])
def test_a_store_that_cannot_be_opened_is_named_with_the_remedy(url):
    pytest.importorskip("redis") if url.startswith("redis") else None
    code, text = run("list", url)
    assert code == 2 and text.startswith("store: ") and url.split(":")[0] in text and "pass" in text


def test_a_copy_names_the_target_that_does_not_answer(backend):
    code, text = run("copy", f"file:{backend.folder}", "tcp://127.0.0.1:1")
    assert code == 2 and text.startswith("store: tcp://127.0.0.1:1: ") and "start this store" in text
