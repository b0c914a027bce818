//! Tests of launches and tensor maps that the main loop of products refuses.

use cuda_std::prelude::*;
use cuda_std::tile::{EmptyStage, Mainloop, Persistent, RegTile, SharedTile, Turn, Warpgroup};
use devcomm::{Element, Simulation, TensorMap, TensorMapDesc};
use devcomm_testing::simulated::failure;
use devcomm_types::GridConstant;

type Factor = SharedTile<bf16, 64>;

cuda_std::arena! {
    struct Memory {
        factor: [Factor; 2],
    }
}

struct Square<'a> {
    map: &'a TensorMap,
    memory: Memory,
}

// SAFETY: each stage has a tile of its own, and `load` copies the bytes that the barrier expects.
unsafe impl Mainloop for Square<'_> {
    type Schedule = Persistent<1>;
    type Registers = ();
    type Sums = RegTile<f32, 8>;
    type Source = ();
    type State = ();
    const COMPUTING: u32 = 1;

    fn stages(&self) -> u32 {
        2
    }

    fn schedule(&self) -> Persistent<1> {
        Persistent { tiles: 1, steps: 1 }
    }

    fn source(&self, _: u32, _: Turn) {}

    fn load(&self, (): &(), _: u32, stage: &EmptyStage) {
        stage.expect(Factor::BYTES);
        stage.load(self.memory.factor(stage.number()), self.map, 0, 0);
    }

    fn state(&self, _: &Warpgroup) {}

    fn compute(&self, group: &Warpgroup, (): &mut (), sums: &mut Self::Sums, at: u32, first: bool) {
        let factor = self.memory.factor(at);
        group.multiply(sums, factor, factor, !first);
    }

    fn finish(&self, _: &Warpgroup, (): &mut (), _: Turn, _: &mut Self::Sums) {}
}

#[kernel(arch = "sm_90a")]
unsafe fn square(map: GridConstant<TensorMap>) {
    // SAFETY: the test passes the map of a matrix of 64 x 64 elements.
    unsafe { Square { map: &map, memory: Memory::dynamic() }.run() }
}

/// Returns the error of a launch with a block of `threads` threads, and a map with tiles of
/// `tile_rows` rows.
fn refused(threads: u32, tile_rows: u32) -> String {
    let error = failure(Simulation::new(1), |gpu| {
        let matrix = gpu.buffer(&[bf16::ONE; 64 * 64])?;
        let map = gpu.context().tensor_map(&TensorMapDesc {
            address: matrix.device_address(),
            rows: 64,
            columns: 64,
            tile_rows,
            data_type: bf16::DATA_TYPE,
        })?;
        let launch = square::args(map).grid(1).block(threads);
        gpu.launch(launch.dynamic_shared(Memory::BYTES))
    });
    error.to_string()
}

#[test]
fn a_block_of_another_size_is_refused() {
    let error = refused(384, 64);
    assert!(error.contains("the block has 384 threads, and the main loop is for 256"), "{error}");
}

#[test]
fn a_map_with_tiles_of_other_rows_is_refused_at_the_callers_line() {
    let error = refused(256, 32);
    assert!(error.contains("the map has tiles of 32 rows, the shared tile has 64"), "{error}");
    assert!(error.contains("sim/main_loop.rs:"), "{error}");
}
