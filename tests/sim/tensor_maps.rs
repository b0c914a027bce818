//! Tests of tensor maps that the simulator or the host refuses.

use cuda_std::mbarrier::MBarrier;
use cuda_std::prelude::*;
use cuda_std::tma;
use devcomm::{Element, Simulation, TensorMap, TensorMapDesc};
use devcomm_testing::simulated::{failure, simulate};
use devcomm_types::GridConstant;
use half::bf16;

use crate::tensor::{aligned_shared, copies_tile};

#[kernel]
unsafe fn foreign_map(map: GridConstant<TensorMap>) {
    let to = aligned_shared();
    // SAFETY: the simulator refuses the map before it copies.
    unsafe {
        let full = MBarrier::at(shared_array![u64; 1]);
        full.init(1);
        tma::load_tile(to, &map, 0, 0, full);
    }
}

#[test]
fn a_tensor_map_of_the_driver_is_refused_with_what_to_do() {
    let error = failure(Simulation::new(1), |gpu| {
        let foreign_map = foreign_map::args(TensorMap { words: [3; 16] });
        gpu.launch(foreign_map.grid(1).block(1).dynamic_shared(16 << 10))
    });
    assert!(error.to_string().contains("Context::tensor_map"), "{error}");
}

#[test]
fn a_copy_from_or_to_a_column_within_16_bytes_is_refused() {
    for (from, to) in [(4, 0), (0, 4)] {
        let error = failure(Simulation::new(1), |gpu| {
            let matrix = gpu.buffer(&[bf16::ONE; 64 * 64])?;
            let map = gpu.context().tensor_map(&TensorMapDesc {
                address: matrix.device_address(),
                rows: 64,
                columns: 64,
                tile_rows: 64,
                data_type: bf16::DATA_TYPE,
            })?;
            let copy = copies_tile::args(map, map, from, to);
            gpu.launch(copy.grid(1).block(1).dynamic_shared(64 * 128 + 1024))
        });
        let error = error.to_string();
        assert!(error.contains("column 4 is not a multiple of 8"), "{error}");
    }
}

#[test]
fn a_matrix_that_tma_cannot_copy_is_refused_with_the_reason() {
    let good =
        TensorMapDesc { address: 64, rows: 1, columns: 16, tile_rows: 1, data_type: u8::DATA_TYPE };
    simulate(Simulation::new(1), |gpu| {
        gpu.context().tensor_map(&good)?;
        for (desc, reason) in [
            (TensorMapDesc { columns: 24, ..good }, "a multiple of 16 elements: it is 1 x 24"),
            (TensorMapDesc { columns: 20, data_type: bf16::DATA_TYPE, ..good }, "multiple of 8"),
            (TensorMapDesc { address: 72, ..good }, "it is at 0x48"),
            (TensorMapDesc { tile_rows: 257, ..good }, "1 to 256 rows, not 257"),
        ] {
            let error = gpu.context().tensor_map(&desc).err().map(|e| e.to_string());
            assert!(error.as_ref().is_some_and(|e| e.contains(reason)), "{desc:?}: {error:?}");
        }
        Ok(())
    });
}
