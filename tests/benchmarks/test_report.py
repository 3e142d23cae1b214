"""The page of all benchmark results: that of the records in the repository, and folders that hold none."""

import pytest

from benchmarks import report


def test_the_page_in_the_repository_is_made_of_the_files_beside_it(tmp_path):
    for path in (*report.RESULTS.glob("*.json"), *report.RESULTS.glob("*.png"), report.RESULTS / "gpu"):
        (tmp_path / path.name).symlink_to(path)
    for sweep in tmp_path.glob("throughput-sweep-*.png"):
        sweep.unlink()  # drawn anew
    text = report.write(tmp_path).read_text()
    assert text == (report.RESULTS / "README.md").read_text()
    assert "## Latencies over stock's" in text and "## Compared with kvpress" in text


@pytest.mark.parametrize("content", [None, "{", '{"results": {}}', "[]"])
def test_a_folder_without_records_is_an_error(tmp_path, content, capsys):
    if content is not None:
        (tmp_path / "broken.json").write_text(content)
    assert report.main([str(tmp_path)]) == 1
    reason = "holds no results" if content is None else "broken.json is not a benchmark's record"
    assert reason in capsys.readouterr().err
