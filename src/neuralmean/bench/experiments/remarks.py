"""What there is to say about each experiment besides its figures: choices the paper leaves open, and what does not reproduce.

The report prints a remark under its experiment. Figures are never repeated here: they stand in the tables.
"""

REMARKS: dict[str, str] = {
    "imagenet": (
        "No OOD image was used to fit or to tune anything. With the set `ImageNet photos`, methods are fitted on one photo "
        "of each class and judged by 300 photos of the validation set, an easy part of it; the other sets are enlarged to the "
        "model's input, and sketch, blur and noise are made from the same 300 photos. With one image of a "
        "class, Mahalanobis methods use the covariance of all images."
    ),
    "false-alarms": (
        "1,000 images to fit on, up to 1,000 held out, up to 2,000 others to judge by (300 and 300 for the photos). Both "
        "rates come from one fit: an image is flagged when its p-value is at most the rate."
    ),
    "sample-size": "Five draws of each size, judged by the same images; the spread is the standard deviation over the draws.",
    "readings": (
        "Each line changes one thing. All are judged by the same images of each set, at most 2,000 (tangent kernels: 500), and "
        "fitted on at most 2,000 ID images and the same images with permuted blocks, or for NMD, NVD and both on OOD images of "
        "CIFAR-100's train part, unless the line says otherwise. Rows with a limit have "
        "no more images than it. After the norm means the channel means of the batch "
        "norm's output, which are a linear function of those of its input."
    ),
    "ablation": (
        "No OOD image was used to fit anything here. The score was chosen on ResNet-20 and -56, both DenseNet-100 and "
        "EfficientNet-Lite0 with these sets in view (docs/typicality.md); peers' settings were chosen with test AUROC in "
        "view too (docs/baselines.md). The other models are for reporting only."
    ),
    "methods": (
        "One fit of every method, all judged by the same images: fewer than elsewhere, for the sake of those that take "
        "gradients or train. What learns from OOD images, or is tuned on some, got those of CIFAR-100, so that it has seen "
        "that set's train images and none of the others'. `full-access` has ODIN, Mahalanobis, Ours-LR, Ours-MLP and "
        "Guided with each set's own images, OE, Energy-FT and GOOD too on ResNet-56 but not on DenseNet-100, and not "
        "ReAct, ASH-S, SCALE, NCI and NAC. The fine-tuned ones had a budget of minutes, GOOD a small network of its own, "
        "CNTK and SCNTK look at pixels and not at the model: docs/baselines.md says what was scaled down."
    ),
    "statistical": (
        "Differences from the paper have several causes. The weights at hand may be trained for a few epochs only (their "
        "metadata say how far); that can touch every method but CNTK and SCNTK, which use no weights. These two look at 100 ID "
        "images, the paper does not say at how many; SCNTK is a reconstruction from its abstract, and the kernel of DK is not "
        "trained (docs/baselines.md). Ours-LR learns from the OOD set's train images, which the kernel methods do not."
    ),
    "full-access": (
        "The paper prints this comparison as a bar chart without numbers; the one number in its text (CIFAR-100, 95.4, "
        "Ours-MLP on ResNet-34) stands beside ours. Sets without a train part (ImageNet, LSUN, iSUN, Textures) are cut in "
        "two: a random 20 % to fit on, the rest to test on. Methods that fine-tune would do so once for each set: on "
        "DenseNet-100 they are left to `methods`, where they are trained once."
    ),
    "zero-shot": (
        "The paper's zero-shot figures do not come out of its recipe here. A detector with signed weights that tells ID "
        "images from the same images with their blocks permuted learns what block borders look like; this carries over to "
        "crops of other photographs but not to SVHN, where the discrepancy points elsewhere: there both fall below chance on "
        "one of the two models. The paper crops, permutes and feeds the same 16 blocks; what else its detectors were given is "
        "not said. `Typicality` is what this library uses where there are no OOD images: it needs no crafted ones."
    ),
    "few-shot": (
        "The paper shows a bar chart without numbers and does not say how many draws it averages. Ten draws here; the "
        "spread is the standard deviation over them. Methods that learn nothing have no spread. Heavy methods (ODIN, "
        "Mahalanobis, Gram) have three draws, and none on DenseNet-100, where all of them would take more than an hour. Gram, "
        "which has no use for OOD images, gets 50 ID images instead, as in the paper: its ranges are the extremes of four or "
        "five images of a class."
    ),
    "transfer": (
        "The paper does not say which of its detectors table 2 shows, so both stand beside it. DenseNet-100, the one model "
        "that is the paper's own here, reproduces: SVHN to a few tenths, imagenet-crop to one point (Ours-LR) or two and a half "
        "(Ours-MLP), with crops that are not the ODIN release's. The small residual networks, which stand in for ResNet-34, "
        "stay below it on SVHN: a direction learnt from CIFAR-100 is not quite the direction in which SVHN lies."
    ),
    "more-datasets": (
        "Full access, as in the paper. Ours-LR comes out above the paper's figure for SVHN: with SVHN's own train images to "
        "learn from, a linear detector is as good as perfect here, as it is for every far set under full access. The "
        "baselines are below the paper's on SVHN: these are other weights of the same architecture. DenseNet-100 is judged "
        "on a part of the images; the rows say how many."
    ),
    "latency": (
        "The paper's times are from a GTX 1080 Ti; what compares across machines is the ratio to the plain forward pass of "
        "the same image, taken in turn. Every fit is timed from pixels, nothing of it comes from the cache; Ours-Avg has "
        "none, as its reference is the batch-norm buffers. NMD on one image costs less over a plain pass than in the paper, "
        "less than KNN and a little more than ViM, which reads the last layer only. `Detector.freeze` runs the same pass "
        "as one graph: its lines say `frozen`. The order of the others is "
        "the paper's (fine-tuned ones one pass; ODIN and G-ODIN two with a gradient) except at its end: Mahalanobis, with its "
        "perturbed pass for each stage, is slower here than Gram, whose powers of products are one pass. GOOD scores with a "
        "small network of its own. Fine-tuned methods have a small budget and heavy ones are judged by 1,000 images, so that "
        "their times to fit and AUROC are not the paper's."
    ),
    "layers": (
        "2,000 images of each kind per fit instead of all, as some twenty detectors are fitted for each OOD set. What the "
        "paper shows is the shape: a few shallow layers suffice for SVHN, deep ones are needed for CIFAR-100."
    ),
    "variance": (
        "What reproduces, for the logistic detector and the MLP alike, is that NVD alone does about as well as NMD and both "
        "together slightly better. The level is that of ResNet-56 with 6,000 images to learn from, not that of ResNet-34."
    ),
    "batch-size": (
        "100 random mini-batches of test images each, as in the paper's figure. CIFAR-100, which the figure does not show, "
        "stays hard at every size: the average magnitude is a detector of far OOD data."
    ),
    "untrained": (
        "The paper does not say what it compares the activations of an untrained network with. With the buffers as they are "
        "born (zero), the score fails on SVHN, as the paper's figure shows, often on the wrong side of chance. With a "
        "reference measured on ID images, random features do tell large batches of SVHN apart, though far less well than "
        "trained ones: even random filters see brightness and contrast."
    ),
}
