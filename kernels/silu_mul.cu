// y = silu(gate) * up, silu(g) = g / (1 + exp(-g)); a row of gate_up holds its gates, then its ups.
//   gate_up : [rows, 2*n]  f32
//   y       : [rows, n]    f32
//   launch: <<<(rows, ceil(n/1024)), 256>>>, any n
extern "C" __global__ void __launch_bounds__(256) silu_mul(
        const float* __restrict__ gate_up, float* __restrict__ y, int n) {
    const float* gate = gate_up + (size_t)blockIdx.x * 2 * n;
    const float* up = gate + n;
    y += (size_t)blockIdx.x * n;
    const int first = blockIdx.y * 1024 + threadIdx.x;
    float g[4], u[4];
    #pragma unroll
    for (int k = 0, i = first; k < 4; k++, i += 256) {
        // all loads are under way before the first is used
        g[k] = i < n ? gate[i] : 0.f;
        u[k] = i < n ? up[i] : 0.f;
    }
    #pragma unroll
    for (int k = 0, i = first; k < 4; k++, i += 256)
        if (i < n)
            y[i] = g[k] / (1.f + expf(-g[k])) * u[k];
}
