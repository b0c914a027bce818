//! Tests of tokens that go to the experts as 8-bit floats with scales.

use devcomm::{Buffer, F8E4M3, Rank, Result};
use devcomm_testing::experts::{Batch, Layout, Routing};
use devcomm_testing::machines::on_gpus;
use half::bf16;

use super::{FORMS, Memory, WHOLE, factor, few, options};

/// Dispatches 8-bit floats, and checks every element and scale. Returns the layout.
pub(super) fn dispatch_f8(
    rank: &Rank,
    memory: &Memory,
    batch: &Batch,
    in_halves: bool,
) -> Result<Layout> {
    let (Memory { experts, stream, .. }, comm) = (memory, rank.communicator()?);
    memory.write(rank, batch)?;
    let tokens = memory.tokens(batch.tokens[rank.rank()]);
    match in_halves {
        true => experts.start_dispatch(tokens, stream)?.receive()?,
        false => experts.dispatch(tokens, stream)?,
    }
    let (most, blocks) = (experts.most_rows(), batch.hidden / 128);
    // These are the rows where they arrive, if they arrive in this order.
    let rows = match experts.rows() {
        Ok(rows) => rows,
        Err(_) => comm.mem_alloc::<F8E4M3>(most * batch.hidden)?.device_slice(),
    };
    let scales = comm.mem_alloc::<f32>(most * blocks)?;
    experts.group_f8(&rows, &scales, stream)?;
    let layout = memory.check_order(rank, batch)?;
    let (mut got, mut got_scales) = (vec![F8E4M3::ZERO; rows.len()], vec![0.0; scales.len()]);
    rows.copy_to_host(&mut got)?;
    scales.copy_to_host(&mut got_scales)?;
    for (at, source, token) in &layout.rows {
        let (wanted, block_scales) = batch.rounded(*source, *token);
        for (i, want) in wanted.iter().enumerate() {
            let scale = got_scales[i / 128 * most + at];
            let got = got[at * batch.hidden + i].to_f32() * scale;
            let is_right = got == *want || got.is_nan() && want.is_nan();
            assert!(is_right, "row {at}, element {i}: {got}, not {want}");
            assert_eq!(scale, block_scales[i / 128], "row {at}, scale {}", i / 128);
        }
    }
    Ok(layout)
}

#[test]
fn rows_arrive_as_8_bit_floats_with_scales() {
    let name = "rows_arrive_as_8_bit_floats_with_scales";
    for ranks in [2, 3, 4, 8] {
        on_gpus(name, ranks, |rank| {
            let tokens: Vec<_> = (0..ranks).map(|rank| (rank * 3 + 1) % 5).collect();
            // A row has more than a warp's part, and no whole number of parts.
            let mut batch =
                Batch::new(if ranks == 2 { 1152 } else { 640 }, 8 * ranks, 3, &tokens, 1);
            // Blocks of 128 elements have different magnitudes.
            for (i, x) in batch.inputs.iter_mut().flatten().enumerate() {
                let size = ((i / 128 * 7 % 41) as f32 - 20.0).exp2();
                *x = bf16::from_f32(x.to_f32() * size);
            }
            for form in FORMS {
                let memory =
                    Memory::new(rank, form(few(rank, options(&batch, 5).f8())), &batch, 5)?;
                for (launch, routing) in
                    [Routing::Random, Routing::Repeated].into_iter().enumerate()
                {
                    batch.route(routing, launch as u64);
                    let layout = dispatch_f8(rank, &memory, &batch, launch == 1)?;
                    memory.apply(rank, &batch, &layout)?;
                    memory.experts.combine(&memory.rows, &memory.output, None, &memory.stream)?;
                    memory.check_output(&batch.combined(rank.rank(), None, factor))?;
                }
                memory.experts.check()?;
            }
            Ok(())
        });
    }
}

#[test]
fn scales_fit_the_largest_and_the_smallest_numbers() {
    on_gpus("scales_fit_the_largest_and_the_smallest_numbers", 2, |rank| {
        let mut batch = Batch::new(1024, 8, 2, &[3, 2], 1).routed(Routing::Random, 1);
        let blocks = [
            [bf16::ZERO, bf16::ZERO],
            [bf16::MAX, bf16::MIN_POSITIVE],
            [bf16::MIN_POSITIVE_SUBNORMAL, bf16::ZERO],
            [bf16::INFINITY, bf16::ONE],
            [bf16::NAN, bf16::ONE],
            // These are the largest number of a scale, and the smallest of the next one.
            [bf16::from_f32(448.0), bf16::from_f32(-0.4375)],
            [bf16::from_f32(-450.0), bf16::from_f32(449.0)],
            [bf16::NEG_INFINITY, bf16::MAX],
        ];
        for (i, x) in batch.inputs.iter_mut().flatten().enumerate() {
            *x = blocks[i / 128 % blocks.len()][usize::from(!i.is_multiple_of(5))];
        }
        let memory = Memory::new(rank, options(&batch, 3).f8().blocks(2).threads(64), &batch, 3)?;
        dispatch_f8(rank, &memory, &batch, WHOLE)?;
        memory.experts.check()
    });
}
