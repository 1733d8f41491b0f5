"""Results as plain text."""

from neuralmean.bench.results import COLUMNS
from neuralmean.bench.table import as_text


def _row(method, ood, auroc, **more):
    blank = dict.fromkeys(COLUMNS)
    return {**blank, "experiment": "e", "model": "resnet56", "id": "cifar10", "protocol": "id-only", "method": method,
            "ood": ood, "auroc": auroc, **more}  # fmt: skip


def test_a_table_has_methods_in_rows_and_the_mean_of_the_sets_that_all_have():
    rows = [
        _row("a", "svhn", 90.0),
        _row("a", "cifar100", 70.0),
        _row("bb", "svhn", 80.04),
        _row("bb", "cifar100", 60.0),
    ]
    title, head, first, second = as_text(rows).splitlines()
    assert title == "e: ResNet-56 on CIFAR-10, id-only; AUROC in %"
    assert head.split() == ["mean", "svhn", "cifar100"]
    assert first.split() == ["a", "80.0", "90.0", "70.0"]
    assert second.split() == ["bb", "70.0", "80.0", "60.0"]


def test_a_cell_without_a_row_is_a_dash_and_not_in_the_mean():
    rows = [_row("a", "svhn", 90.0), _row("a", "cifar100", 70.0), _row("b", "svhn", 80.0)]
    assert as_text(rows).splitlines()[2].split() == ["a", "90.0", "90.0", "70.0"]
    assert as_text(rows).splitlines()[3].split() == ["b", "80.0", "80.0", "-"]


def test_settings_have_lines_and_models_tables_of_their_own():
    rows = [_row("a", "svhn", 90.0), _row("a", "svhn", 91.0, setting="batch 4"), _row("a", "svhn", None)]
    assert as_text(rows).splitlines()[3].split("  ")[0] == "a, batch 4"
    assert len(as_text([*rows, _row("a", "svhn", 90.0, model="resnet20")]).split("\n\n")) == 2


def test_false_alarms_are_lines_with_their_interval():
    row = _row(
        "typicality", "cifar10", None, setting="5 % asked", false_alarms=5.5, false_alarms_ci=[2.8, 9.6], n_id=200
    )
    assert as_text([row]).splitlines()[1].split() == [
        "resnet56",
        "5",
        "%",
        "asked",
        "5.5",
        "%",
        "[2.8,",
        "9.6]",
        "of",
        "200",
    ]


def test_imagenet_has_means_over_near_and_far_sets_and_fpr95():
    rows = [
        _row("msp", ood, auroc, experiment="imagenet", tnr95=tnr95)
        for ood, auroc, tnr95 in (
            ("ssb-hard", 70.0, 10.0),
            ("ninco", 80.0, 20.0),
            ("textures", 90.0, 60.0),
            ("photo-blur", 95.0, 80.0),
        )
    ]
    caption, head, line = as_text(rows).split("\n\n")[1].splitlines()
    assert caption == "ResNet-56: means over sets, %"
    assert [part.strip() for part in head.split("  ") if part] == [
        "method", "near, AUROC", "near, FPR95", "far, AUROC", "far, FPR95", "altered, AUROC", "altered, FPR95",
        "all, AUROC", "all, FPR95",
    ]  # fmt: skip
    assert line.split() == ["MSP", "75.0", "85.0", "90.0", "40.0", "95.0", "20.0", "83.8", "57.5"]
