"""Round as another processor would: every product of matrices is changed a little, in another way for each shape.

`DIVDEC_TEST_ROUNDING=1e-6 pytest` does so. BLAS libraries choose their kernels by shape and processor, so that equal
rows of differently shaped inputs differ in their last bits; on some processors the tests' small shapes never show it.
Equal inputs of equal shapes still give equal bits.
"""

import functools
import warnings

import torch

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addmv", "addmv_", "dot", "_scaled_dot_product_flash_attention_for_cpu")
PRODUCTS += ("mkldnn_convolution", "_slow_conv2d_forward")


library = torch.library.Library("aten", "IMPL")  # what it registers lasts as long as it does


def install(size):
    """Change every product of float32 by up to `size` times its value, of float64 by as many last bits."""
    for name in PRODUCTS:
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
        with warnings.catch_warnings(action="ignore"):  # that a kernel is replaced
            library.impl(
                name, functools.partial(rounded, name, kernel, size), "CPU", with_keyset=True, allow_override=True
            )


def rounded(name, kernel, size, keyset, *arguments, **options):
    result = kernel.call_boxed(keyset, *arguments, **options)
    shapes = tuple(tuple(one.shape) for one in arguments if isinstance(one, torch.Tensor))
    product = result[0] if isinstance(result, tuple) else result
    if product.is_floating_point():
        product.mul_(factors(name, shapes, tuple(product.shape[-2:]), product.dtype, size))
    return result


@functools.lru_cache(maxsize=256)
def factors(name, shapes, shape, dtype, size):
    generator = torch.Generator().manual_seed(hash((*map(ord, name), shapes)) % 2**31)
    size *= min(1.0, torch.finfo(dtype).eps / torch.finfo(torch.float32).eps)
    return (1 + size * (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1)).to(dtype)
