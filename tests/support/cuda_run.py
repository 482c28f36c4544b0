"""A program that runs every CUDA kernel once, on small sizes."""

SMALL_RUN = """
import torch
from zbkern.kernels.cuda import wgrad

def random(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)

for dtype in (torch.bfloat16, torch.float16):
    for out in (torch.float32, dtype):
        for n, k in ((136, 264), (264, 72), (1024, 1024)):  # ragged tiles, the narrow tile, the wide one
            segments = [(random(m, k, dtype=dtype), random(m, n, dtype=dtype)) for m in (65, 128, 1)]
            dweight, dbias = random(n, k, dtype=out), random(n, dtype=out)
            for places, options in ((2, {}), (132, {}), (132, {"max_tiles": 1})):
                wgrad._processors = lambda device: places
                for outputs in ((dweight, dbias), (dweight, None)):
                    wgrad.linear_wgrads([(segments, outputs)], True, **options)
                    wgrad.linear_wgrads([(segments, outputs)], False, **options)
products = [([(random(m, k), random(m, n))], (random(n, k, dtype=torch.float32), random(n, dtype=torch.float32)))
            for m, n, k in ((64, 136, 264), (100, 512, 256), (1, 8, 8), (70, 256, 128), (64, 128, 128))]
wgrad.linear_wgrads(products, True)
torch.cuda.synchronize()
"""
