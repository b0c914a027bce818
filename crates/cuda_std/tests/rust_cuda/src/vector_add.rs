use cuda_std::prelude::*;

/// Computes `c[i] = a[i] + b[i]`, one element per thread.
#[kernel]
#[allow(improper_ctypes_definitions)]
pub unsafe fn vector_add(a: &[f32], b: &[f32], c: *mut f32) {
    let i = thread::index_1d() as usize;
    if i < a.len() && i < b.len() {
        let out = unsafe { &mut *c.add(i) };
        *out = a[i] + b[i];
    }
}
