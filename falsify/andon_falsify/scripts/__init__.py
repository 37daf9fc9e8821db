"""Script mode: a training command as it is, run on several layouts of one global batch and judged by its ledgers.

    andon falsify --script "torchrun --nproc-per-node {world} -m andon watch train.py
        --batch {local_batch} --accumulate {accumulation}"

The ledgers are written by `andon.watch`, in the script or around it. No reference is needed: what is right gives the
same gradients on every layout.
"""
