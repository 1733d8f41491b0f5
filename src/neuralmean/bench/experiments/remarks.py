"""Remarks on each experiment: choices that the paper leaves open, and results that do not reproduce.

The report prints each remark below its experiment. Remarks repeat no figures; these are in the tables.
"""

REMARKS: dict[str, str] = {
    "imagenet": (
        "No OOD image was used to fit or tune anything. With the set `ImageNet photos`, methods are fitted on one "
        "photo of each class and tested on 300 easy photos of the validation set; the other sets are resized to the "
        "model's input, and sketch, blur and noise are made from the same 300 photos. With one image per class, "
        "Mahalanobis methods use the covariance of all images."
    ),
    "false-alarms": (
        "1,000 images to fit on, up to 1,000 held out, and up to 2,000 others to test on (300 and 300 for the "
        "photos). Both rates come from one fit: an image is flagged if its p-value is at most the rate."
    ),
    "sample-size": "Five draws of each size, tested on the same images; the spread is the standard deviation over the draws.",
    "readings": (
        "Each row changes one thing. All are tested on the same images of each set, at most 2,000 (tangent kernels: "
        "500). Unless the row says otherwise, they are fitted on at most 2,000 ID images and the same images with "
        "permuted blocks, or for NMD, NVD and both on OOD images of CIFAR-100's train split. Rows with a limit use "
        'at most that many images. "After the norm" means the channel means of the batch norm\'s output, which are a '
        "linear function of those of its input."
    ),
    "ablation": (
        "No OOD image was used to fit anything here. The score was chosen on ResNet-20 and -56, both DenseNet-100 "
        "and EfficientNet-Lite0 with these sets in view (docs/typicality.md); the settings of the peers were chosen "
        "with test AUROC in view too (docs/baselines.md). The other models are for reporting only."
    ),
    "methods": (
        "One fit per method, all tested on the same images, fewer than elsewhere because some methods take "
        "gradients or train. Methods that learn from OOD images, or are tuned on some, got those of CIFAR-100: they "
        "have seen the train images of that set and no other. `full-access` has ODIN, Mahalanobis, Ours-LR, "
        "Ours-MLP and Guided with each set's own images, and OE, Energy-FT and GOOD on ResNet-56 only; it lacks "
        "ReAct, ASH-S, SCALE, NCI and NAC. Fine-tuned methods had a budget of minutes, GOOD uses a small network of "
        "its own, and CNTK and SCNTK read pixels instead of the model: docs/baselines.md says what was scaled down."
    ),
    "statistical": (
        "Differences from the paper have several causes. The available weights may be trained for a few epochs "
        "only, as their metadata say; this affects all methods but CNTK and SCNTK, which use no weights. These two "
        "are evaluated with 100 ID images (the paper does not say how many it uses), SCNTK is a reconstruction from "
        "its abstract, and the kernel of DK is not trained (docs/baselines.md). Ours-LR learns from the OOD set's "
        "train images, which the kernel methods do not."
    ),
    "full-access": (
        "The paper prints this comparison as a bar chart without numbers; the one number in its text (CIFAR-100, "
        "95.4, Ours-MLP on ResNet-34) is shown next to ours. Sets without a train split (ImageNet, LSUN, iSUN, "
        "Textures) are split in two: a random 20 % to fit on, the rest to test on. Fine-tuned methods would train "
        "once per set; on DenseNet-100 they are covered by `methods`, where they train once."
    ),
    "zero-shot": (
        "The paper's zero-shot figures could not be reproduced with its recipe. A detector with signed weights that "
        "separates ID images from the same images with permuted blocks learns what block borders look like. This "
        "transfers to crops of other photographs but not to SVHN, whose discrepancy points in another direction: "
        "there, both detectors fall below chance on one of the two models. The paper crops, permutes and feeds the "
        "same 16 blocks; it does not say what else its detectors were given. `Typicality` is what this library uses "
        "without OOD images: it needs no crafted ones."
    ),
    "few-shot": (
        "The paper shows a bar chart without numbers and does not say how many draws it averages. Here there are "
        "ten draws, and the spread is the standard deviation over them; methods that learn nothing have no spread. "
        "Heavy methods (ODIN, Mahalanobis, Gram) have three draws, and none on DenseNet-100, where they would take "
        "more than an hour together. Gram, which uses no OOD images, gets 50 ID images instead, as in the paper: "
        "its ranges are the extremes of four or five images per class."
    ),
    "transfer": (
        "The paper does not say which of its detectors table 2 shows, so both are compared with it. DenseNet-100, "
        "the only model that is the paper's own here, reproduces it: SVHN to a few tenths, imagenet-crop to one "
        "point (Ours-LR) or two and a half (Ours-MLP), with crops that are not the ODIN release's. The small "
        "residual networks, which replace ResNet-34, stay below it on SVHN: the direction learnt from CIFAR-100 is "
        "not quite that of SVHN."
    ),
    "more-datasets": (
        "Full access, as in the paper. Ours-LR exceeds the paper's figure for SVHN: with SVHN's own train images to "
        "learn from, a linear detector is nearly perfect, as it is for every far set under full access. The "
        "baselines are below the paper's on SVHN, with other weights of the same architecture. DenseNet-100 is "
        "tested on a part of the images; the rows say how many."
    ),
    "latency": (
        "The paper's times are from a GTX 1080 Ti; comparable across machines is the ratio to a plain forward pass "
        "of the same image, timed alternately. Fits are timed from pixels, without the cache; Ours-Avg has no fit, "
        "as its reference is the batch-norm buffers. For one image, NMD adds less to a plain pass than in the "
        "paper, less than KNN and a little more than ViM, which reads only the last layer. Rows marked `frozen` run "
        "the same pass as one graph (`Detector.freeze`). The other methods are in the paper's order (fine-tuned "
        "ones take one pass; ODIN and G-ODIN two with a gradient) except at its end: Mahalanobis, with a perturbed "
        "pass for each stage, is slower here than Gram, whose powers of products take one pass. GOOD scores with a "
        "small network of its own. Fine-tuned methods have a small budget and heavy ones are tested on 1,000 "
        "images, so their times to fit and AUROC are not the paper's."
    ),
    "layers": (
        "2,000 images of each kind per fit instead of all, as some twenty detectors are fitted for each OOD set. "
        "What matters is the shape: a few shallow layers suffice for SVHN, while CIFAR-100 needs deep ones."
    ),
    "variance": (
        "As in the paper, for the logistic detector and the MLP alike, NVD alone does about as well as NMD, and "
        "both together slightly better. The level is that of ResNet-56 with 6,000 images to learn from, not that of "
        "ResNet-34."
    ),
    "batch-size": (
        "100 random mini-batches of test images each, as in the paper's figure. CIFAR-100, which the figure does "
        "not show, stays hard at every size: the average magnitude detects far OOD data."
    ),
    "untrained": (
        "The paper does not say what it compares the activations of an untrained network with. With the initial "
        "buffers (zero), the score fails on SVHN, as in the paper's figure, often below chance. With a reference "
        "measured on ID images, random features do separate large batches of SVHN, though far less well than "
        "trained ones: even random filters respond to brightness and contrast."
    ),
}
