"""What there is to say about each experiment besides its figures: choices the paper leaves open, and what does not reproduce.

The report prints a remark under its experiment. Figures are never repeated here: they stand in the tables.
"""

REMARKS: dict[str, str] = {
    "ablation": (
        "No OOD image was used to fit anything here. The score was chosen on ResNet-56 and these sets, except that the "
        "reach term and the temperature were added after DenseNet-100 on CIFAR-100 had lost without them; peers' settings "
        "were chosen with test AUROC in view (docs/baselines.md). The other models are for reporting only."
    ),
    "statistical": (
        "The paper's ConvNet-4 is trained to convergence; the weights at hand may be trained for a few epochs only (their "
        "metadata say how far). Ours-LR learns from the OOD set's train images, which the kernel methods do not."
    ),
    "full-access": (
        "The paper prints this comparison as a bar chart without numbers; the one number in its text (CIFAR-100, 95.4, "
        "Ours-MLP on ResNet-34) stands beside ours. Sets without a train part (ImageNet, LSUN, iSUN, Textures) are cut in "
        "two: a random 20 % to fit on, the rest to test on."
    ),
    "zero-shot": (
        "The paper's zero-shot figures do not come out of its recipe here. A detector with signed weights that tells ID "
        "images from the same images with their blocks permuted learns what block borders look like; this carries over to "
        "crops of other photographs but not to SVHN, where the discrepancy points elsewhere. Absolute values of "
        "standardised NMD carry over better in a quick trial (SVHN 90.6 instead of 60.6 on ResNet-56) and still miss the "
        "paper's figure. `Ours (ID only)` is what this library uses where there are no OOD images: it needs no crafted ones."
    ),
    "few-shot": (
        "The paper shows a bar chart without numbers and does not say how many draws it averages. Ten draws here; the "
        "spread is the standard deviation over them. Methods that learn nothing have no spread."
    ),
    "transfer": (
        "The paper does not say which of its detectors table 2 shows, so both stand beside it. Its figures for far OOD sets "
        "are higher than ours: a signed direction learnt from CIFAR-100 is not the direction in which SVHN lies. The "
        "paper's ImageNet-C is the crop of Tiny-ImageNet in the ODIN release; other crops give other figures."
    ),
    "more-datasets": "Full access, as in the paper. DenseNet-100 is judged on a part of the images; the rows say how many.",
    "latency": (
        "The paper's times are from a GTX 1080 Ti; what compares across machines is the ratio to the plain forward pass of "
        "the same image, taken in turn. On a CPU the pass itself takes longer and small reductions cost more."
    ),
    "layers": (
        "2,000 images of each kind per fit instead of all, as some twenty detectors are fitted for each OOD set. What the "
        "paper shows is the shape: a few shallow layers suffice for SVHN, deep ones are needed for CIFAR-100."
    ),
    "variance": (
        "The paper's differences (95.4, 95.3, 95.6) are within what another seed changes; what reproduces is that NVD alone "
        "does about as well as NMD and both together slightly better."
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
