// What the experts of a row have to say, weighted and added up in the order of its picks.
//   d       : [picks, n]     f32   picks = rows * top
//   weights : [rows, top]    f32
//   seq     : [rows]         i32   negative: the row is padding, and gets nothing from experts; or
//                                  null
//   add     : [rows, n]      f32   added to the result, may be y; or null
//   y       : [rows, n]      f32
//   launch: <<<(ceil(n/512), rows), 128>>>
extern "C" __global__ void __launch_bounds__(128, 8) moe_gather(
        const float* __restrict__ d, const float* __restrict__ weights,
        const int* __restrict__ seq, const float* add, float* y, int n, int top) {
    const int r = blockIdx.y;
    const int c = (blockIdx.x * 128 + threadIdx.x) * 4;
    if (c >= n)
        return;
    const int picks = !seq || seq[r] >= 0 ? top : 0;
    const size_t o = (size_t)r * n + c;
    const bool wide = n % 4 == 0;
    const bool whole = wide && (((size_t)add | (size_t)y) & 15) == 0;
    float v[4] = {};
    // read before anything is written: add may be y
    float4 a = make_float4(0.f, 0.f, 0.f, 0.f);
    if (whole && add)
        a = *(const float4*)(add + o);
    if (wide) {
        #pragma unroll 8
        for (int j = 0; j < picks; j++) {
            const float w = weights[(size_t)r * top + j];
            const float4 q = *(const float4*)(d + ((size_t)r * top + j) * n + c);
            v[0] = fmaf(w, q.x, v[0]);
            v[1] = fmaf(w, q.y, v[1]);
            v[2] = fmaf(w, q.z, v[2]);
            v[3] = fmaf(w, q.w, v[3]);
        }
    } else
        for (int j = 0; j < picks; j++) {
            const float w = weights[(size_t)r * top + j];
            const float* p = d + ((size_t)r * top + j) * n + c;
            #pragma unroll
            for (int i = 0; i < 4; i++)
                if (c + i < n)
                    v[i] = fmaf(w, p[i], v[i]);
        }
    if (whole) {
        *(float4*)(y + o) = make_float4(
                v[0] + a.x, v[1] + a.y, v[2] + a.z, v[3] + a.w);
        return;
    }
    for (int i = 0; i < 4 && c + i < n; i++)
        y[o + i] = v[i] + (add ? add[o + i] : 0.f);
}
