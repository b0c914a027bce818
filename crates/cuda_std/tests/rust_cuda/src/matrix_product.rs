use cuda_std::address_space;
use cuda_std::kernel;
use cuda_std::thread;

const SIDE: usize = 16;

/// Computes `c = a * b` for row-major matrices: `a` has `rows` x `inner` elements, `b` has `inner`
/// x `columns`. Blocks have 256 threads, in one or two dimensions. There is one block per tile of
/// 16 x 16 elements.
#[kernel]
#[allow(improper_ctypes_definitions)]
pub unsafe fn matrix_product(
    a: &[f32],
    b: &[f32],
    c: *mut f32,
    rows: usize,
    columns: usize,
    inner: usize,
) {
    #[address_space(shared)]
    static mut LEFT: [f32; SIDE * SIDE] = [0.0; SIDE * SIDE];
    #[address_space(shared)]
    static mut RIGHT: [f32; SIDE * SIDE] = [0.0; SIDE * SIDE];

    let index = thread::thread_idx_y() * thread::block_dim_x() + thread::thread_idx_x();
    let (x, y) = (index as usize % SIDE, index as usize / SIDE);
    let tile = (thread::block_idx_y() * thread::grid_dim_x() + thread::block_idx_x()) as usize;
    let across = columns.div_ceil(SIDE);
    let row = tile / across * SIDE + y;
    let column = tile % across * SIDE + x;
    let mut sum = 0.0f32;
    for first in (0..inner).step_by(SIDE) {
        let left = if row < rows && first + x < inner { a[row * inner + first + x] } else { 0.0 };
        let right = if first + y < inner && column < columns {
            b[(first + y) * columns + column]
        } else {
            0.0
        };
        unsafe {
            LEFT[y * SIDE + x] = left;
            RIGHT[y * SIDE + x] = right;
        }
        thread::sync_threads();
        for i in 0..SIDE {
            sum += unsafe { LEFT[y * SIDE + i] * RIGHT[i * SIDE + x] };
        }
        thread::sync_threads();
    }
    if row < rows && column < columns {
        unsafe { *c.add(row * columns + column) = sum };
    }
}
