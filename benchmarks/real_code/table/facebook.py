"""facebookresearch: networks that learn from images without labels, with teachers and momentum encoders."""

from __future__ import annotations

from benchmarks.real_code.data import images
from benchmarks.real_code.row import Patch, Row

_MODULES = ("torchvision", "PIL")
_SMALL_CROP = "RandomResizedCrop(32, scale=(0.2, 1.)"
_ONE_GROUP = "images --dist-url env:// --dist-backend gloo -a resnet18 -b 4 -j 0 --epochs 2 --seed 1"

ROWS = (
    Row(
        name="facebookresearch/mae/main_pretrain",
        repository="facebookresearch/mae",
        commit="efb2a8062c206524e35e47d04501ed4f544c0ae8",
        path="main_pretrain.py",
        family="DDP; accumulation by counting, without no_sync; a disabled scaler; rates set by hand",
        arguments="--model mae_vit_base_patch16 --input_size 32 --data_path images --batch_size 4 --accum_iter 2"
        " --epochs 2 --warmup_epochs 1 --num_workers 0 --device cpu",
        patches=(
            Patch('assert timm.__version__ == "0.3.2"', "assert timm.__version__"),
            Patch(
                "models_mae.__dict__[args.model](",
                "models_mae.MaskedAutoencoderViT(32, 16, embed_dim=32, depth=1, num_heads=2, decoder_embed_dim=32,"
                " decoder_depth=1, decoder_num_heads=2, ",
            ),
            Patch("optim_factory.add_weight_decay", "optim_factory.param_groups_weight_decay"),
            Patch(
                "Block(embed_dim, num_heads, mlp_ratio, qkv_bias=True, qk_scale=None",
                "Block(embed_dim, num_heads, mlp_ratio, qkv_bias=True",
                "models_mae.py",
            ),
            Patch(
                "Block(decoder_embed_dim, decoder_num_heads, mlp_ratio, qkv_bias=True, qk_scale=None",
                "Block(decoder_embed_dim, decoder_num_heads, mlp_ratio, qkv_bias=True",
                "models_mae.py",
            ),
            Patch("dtype=np.float)", "dtype=float)", "util/pos_embed.py"),
            Patch("dtype=torch.float64, device='cuda')", "dtype=torch.float64)", "util/misc.py"),
            Patch("from torch._six import inf", "from math import inf", "util/misc.py"),
        ),
        gpu=True,
        prepare=images,
        modules=(*_MODULES, "timm", "tensorboard"),
    ),
    Row(
        name="facebookresearch/moco/main_moco",
        repository="facebookresearch/moco",
        commit="7397dfe146c7ca6bbb58e9c382498069178ba764",
        path="main_moco.py",
        family="DDP; a momentum encoder inside the model; a queue; batches shuffled between ranks",
        arguments=f"{_ONE_GROUP} --moco-k 64 --moco-dim 16 --aug-plus --cos",
        patches=(Patch("correct[:k].view(-1)", "correct[:k].reshape(-1)"),),
        gpu=True,
        prepare=images,
        modules=_MODULES,
    ),
    Row(
        name="facebookresearch/simsiam/main_simsiam",
        repository="facebookresearch/simsiam",
        commit="a7bc1772896d0dad0806c51f0bb6f3b16d290468",
        path="main_simsiam.py",
        family="DDP; batch norms of each rank; groups with their own rates",
        arguments=f"{_ONE_GROUP} --dim 32 --pred-dim 16 --fix-pred-lr",
        patches=(
            Patch("model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)", "pass"),
            Patch("RandomResizedCrop(224, scale=(0.2, 1.)", _SMALL_CROP),
        ),
        gpu=True,
        prepare=images,
        modules=_MODULES,
    ),
)
