// Rotary embedding, NeoX pairing: elements i and i + half of every head turn by the i-th angle of
// their row; from 2*half on they pass.
//   x        : [rows:xs, heads, dim]  f32     xs, ys: elements from one row to the next, so that
//                                             both may be slices of a wider array
//   y        : [rows:ys, heads, dim]  f32     may be x
//   cos, sin : [rows, half]           f32     2*half <= dim
//   launch: <<<(rows, ceil(heads*(dim-half)/256)), 256>>>
extern "C" __global__ void __launch_bounds__(256)
        rope(const float* x, const float* __restrict__ cos,
                const float* __restrict__ sin, float* y, int heads, int dim,
                int half, int xs, int ys) {
    // of a head: `half` pairs, then the elements that pass
    const int lanes = dim - half;
    const int t = blockIdx.y * blockDim.x + threadIdx.x;
    const int h = t / lanes;
    const int i = t % lanes;
    if (h >= heads)
        return;
    x += (size_t)blockIdx.x * xs + h * dim + i;
    y += (size_t)blockIdx.x * ys + h * dim + i;
    if (i >= half) {
        y[half] = x[half];
        return;
    }
    const float c = cos[(size_t)blockIdx.x * half + i];
    const float s = sin[(size_t)blockIdx.x * half + i];
    const float a = x[0], b = x[half];
    y[0] = a * c - b * s;
    y[half] = b * c + a * s;
}
