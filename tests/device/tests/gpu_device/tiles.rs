//! Tests of tensor cores: products of all layouts of the factors.

use cuda_std::{bf16, f16};
use devcomm::{Element, Error, LaunchConfig, LaunchError, Simulation, TensorMapDesc};
use devcomm_device_tests::KERNELS;
use devcomm_device_tests::kernels::{
    self,
    tiles::{PRODUCT_N, REG_COLUMNS},
};
use devcomm_testing::gemm::{Factor, Problem};
use devcomm_testing::machines::Gpus;
use devcomm_testing::simulated::read;

/// Returns the transpose of a row-major matrix with this many columns.
fn transpose<T: Copy>(matrix: &[T], columns: usize) -> Vec<T> {
    (0..columns).flat_map(|column| matrix.iter().skip(column).step_by(columns).copied()).collect()
}

/// Threads and dynamic shared memory: three tiles, and the padding that aligns them.
const LAUNCH: (u32, u32) = (128, 3 * 64 * 128 + 1024);

/// Multiplies matrices of 64 terms in every layout.
macro_rules! multiplies {
    ($type:ident, $rank:ident) => {{
        let (comm, stream) = ($rank.communicator()?, $rank.stream()?);
        let (m, n, k) = (64, PRODUCT_N as usize, 64);
        let problem = Problem { m, n, k, seed: 1 };
        for layouts in [[false, false], [false, true], [true, false], [true, true]] {
            let stored = |factor, rows: usize, transposed| {
                let elements = problem.factor::<$type>(factor, 0);
                let buffer = comm.mem_alloc::<$type>(rows * k)?;
                let (elements, rows, columns) = match transposed {
                    true => (transpose(&elements, k), k, rows),
                    false => (elements, rows, k),
                };
                buffer.copy_from_host(&elements)?;
                let map = TensorMapDesc {
                    address: buffer.device_address(),
                    rows: rows as u32,
                    columns: columns as u32,
                    tile_rows: 64,
                    data_type: bf16::DATA_TYPE,
                };
                Ok::<_, Error>((stream.context().tensor_map(&map)?, buffer))
            };
            let (a, _a) = stored(Factor::A, m, layouts[0])?;
            let (b, _b) = stored(Factor::B, n, layouts[1])?;
            let c = comm.mem_alloc::<f32>(m * n)?;
            let config = LaunchConfig::new(1, LAUNCH.0).with_dynamic_shared(LAUNCH.1);
            let [transposed_a, transposed_b] = layouts;
            let product =
                kernels::product_of_layouts::<$type>::args(a, b, &c, transposed_a, transposed_b);
            // SAFETY: the maps' matrices and C have the sizes that the kernel expects.
            unsafe { product.config(config).launch(&stream)? };
            stream.synchronize()?;
            let wrong = problem.count_wrong(0..1, &read(&c)?, problem.all());
            assert_eq!(wrong, 0, "{} with A, B transposed: {layouts:?}", <$type>::NAME);
        }
    }};
}

#[test]
fn tensor_cores_multiply_factors_of_every_layout() {
    let gpus = Gpus::from(Simulation::new(1)).with_kernels(&KERNELS);
    gpus.run("tensor_cores_multiply_factors_of_every_layout", |rank| {
        rank.load(&KERNELS)?;
        let (threads, shared) = LAUNCH;
        let context = rank.context();
        match context.resident_blocks::<kernels::product_of_layouts<bf16>>(threads, shared) {
            // This is not a GPU of the Hopper family.
            Err(Error::Launch(LaunchError::WrongArch { .. })) => return Ok(()),
            resident => assert!(resident? > 0),
        }
        multiplies!(bf16, rank);
        multiplies!(f16, rank);
        Ok(())
    });
}

#[test]
fn a_tile_in_registers_knows_its_rows_and_columns() {
    let gpus = Gpus::from(Simulation::new(1)).with_kernels(&KERNELS);
    gpus.run("a_tile_in_registers_knows_its_rows_and_columns", |rank| {
        rank.load(&KERNELS)?;
        let (comm, stream, columns) = (rank.communicator()?, rank.stream()?, REG_COLUMNS as usize);
        let count = 16 * columns;
        let x: Vec<f32> = (0..count).map(|i| (i * 37 % 101) as f32 - 50.0).collect();
        let (input, out) = (comm.mem_alloc::<f32>(count)?, comm.mem_alloc::<f32>(count)?);
        input.copy_from_host(&x)?;
        // SAFETY: both have an element for each of the tile's.
        unsafe { kernels::combines_a_tile::args(&input, &out).grid(1).block(32).launch(&stream)? };
        stream.synchronize()?;
        for (i, got) in read(&out)?.into_iter().enumerate() {
            let (row, column) = (&x[i / columns * columns..][..columns], i % columns);
            let largest = row.iter().copied().fold(f32::MIN, f32::max);
            let sum: f32 = x.iter().skip(column).step_by(columns).sum();
            assert_eq!(got, 3.0 * x[i] - largest + sum, "element {i}");
        }
        Ok(())
    });
}
