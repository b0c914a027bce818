//! Tests of what only the form for high throughput does, which sends counts first. The other tests
//! run both forms.

use devcomm::{ExpertParallelMemory, F8E4M3};

use super::*;

/// Returns memory of the form for high throughput, whose `rows` are where they arrive.
fn in_place(rank: &Rank, batch: &Batch, most: usize) -> Result<Memory> {
    let options = few(rank, options(batch, most)).throughput(usize::MAX);
    let memory = Memory::new(rank, options, batch, most)?;
    Ok(Memory { rows: memory.experts.rows()?, ..memory })
}

#[test]
fn rows_arrive_in_the_order_of_the_experts() {
    routed_steps("rows_arrive_in_the_order_of_the_experts", in_place);
}

/// There are more tokens than a block places at a time.
#[test]
fn many_tokens_have_places() {
    on_gpus("many_tokens_have_places", 2, |rank| {
        let mut batch = Batch::new(16, 8, 3, &[150, 131], 1);
        for blocks in [1, 2] {
            let options = options(&batch, 150).throughput(usize::MAX).blocks(blocks).threads(64);
            let memory = Memory::new(rank, options, &batch, 150)?;
            let memory = Memory { rows: memory.experts.rows()?, ..memory };
            for (launch, routing) in [Routing::Skewed, Routing::Repeated].into_iter().enumerate() {
                batch.route(routing, launch as u64);
                checked_step(rank, &memory, &batch, launch == 1)?;
            }
        }
        Ok(())
    });
}

/// All tokens of all ranks go to one rank, which has room for fewer rows.
#[test]
fn rows_beyond_the_limit_are_reported_by_every_rank() {
    for ranks in [2, 3] {
        on_gpus("rows_beyond_the_limit_are_reported_by_every_rank", ranks, |rank| {
            let (me, limit) = (rank.rank(), 4);
            let mut batch = Batch::new(64, 2 * ranks, 2, &vec![3; ranks], 1);
            let options = few(rank, options(&batch, 3)).throughput(limit);
            let memory = Memory::new(rank, options, &batch, 3)?;
            let Memory { experts, stream, output, .. } = &memory;
            assert_eq!(experts.most_rows(), limit);
            for tokens in [3, 1] {
                // All tokens go to experts of the last rank.
                for ids in &mut batch.ids {
                    ids.fill(-1);
                    let (own, experts) = (&mut ids[..2 * tokens], 2 * ranks as i32);
                    own.chunks_mut(2)
                        .for_each(|ids| ids.copy_from_slice(&[experts - 2, experts - 1]));
                }
                memory.write(rank, &batch)?;
                experts.dispatch(memory.tokens(3), stream)?;
                let rows = experts.rows()?;
                experts.group(&rows, stream)?;
                experts.combine(&rows, output, None, stream)?;
                stream.synchronize()?;
                let needed = 2 * ranks * tokens;
                if needed <= limit {
                    experts.check()?;
                    continue;
                }
                let error = experts.check().unwrap_err().to_string();
                let text = format!("experts of rank {} need {needed} rows", ranks - 1);
                assert!(error.contains(&text) && error.contains("room for 4"), "{error}");
                // The rows for which there is room have arrived.
                let layout = batch.layout(me);
                let arrived: Vec<_> = layout.rows.iter().take(limit).copied().collect();
                let mut got = vec![bf16::NAN; rows.len()];
                rows.copy_to_host(&mut got)?;
                let arrived = Layout { rows: arrived, ..layout };
                assert_eq!(batch.count_wrong_rows(&arrived, &got), 0);
            }
            // The next step is right.
            batch.route(Routing::None, 1);
            memory.write(rank, &batch)?;
            experts.dispatch(memory.tokens(3), stream)?;
            experts.group(&experts.rows()?, stream)?;
            experts.combine(&experts.rows()?, output, None, stream)?;
            memory.check_output(&batch.combined(me, None, |_| 1.0))?;
            experts.check()
        });
    }
}

#[test]
fn what_high_throughput_cannot_do_is_refused() {
    on_gpus("what_high_throughput_cannot_do_is_refused", 2, |rank| {
        let (comm, me) = (rank.communicator()?, rank.rank());
        let refused = |options: ExpertParallelOptions, why: &str| {
            let error = options.build(comm).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        };
        let new = || ExpertParallelOptions::new(128, 4, 8, 2);
        refused(new().throughput(0), "room for 0 rows");
        refused(new().throughput(5 + me), "rows for high throughput is 5 on rank 0 and 6 on");
        refused(new().throughput(5).alignment(1 + me), "alignment is 1 on rank 0 and 2 on rank 1");
        let (plain, f8) = (new().throughput(6).build(comm)?, new().throughput(6).f8().build(comm)?);
        assert_eq!(format!("{plain:?}"), "ExpertParallel(2 ranks, room for 6 rows)");
        let refused = |error: devcomm::Error, why: &str| {
            assert!(error.to_string().contains(why), "{error}");
        };
        refused(new().build(comm)?.rows::<bf16>().unwrap_err(), "arrive in no order");
        refused(plain.rows::<F8E4M3>().unwrap_err(), "no 8-bit floats");
        refused(f8.rows::<bf16>().unwrap_err(), "8-bit floats with scales");
        let batch = Batch::new(128, 8, 2, &[4, 4], 1).routed(Routing::Random, 1);
        let memory = Memory::new(rank, new().throughput(6), &batch, 4)?;
        memory.write(rank, &batch)?;
        let Memory { experts, stream, rows, .. } = &memory;
        experts.dispatch(memory.tokens(0), stream)?;
        let few = rows.slice(..128 * 5)?;
        refused(experts.group(&few, stream).unwrap_err(), "needs 6 x 128");
        experts.group(rows, stream)?;
        experts.check()
    });
}

#[test]
fn memory_for_high_throughput_is_as_large_as_it_says() {
    let options = ExpertParallelOptions::new(7168, 4096, 256, 8).throughput(20_000);
    let row = 7168 * 2;
    let ExpertParallelMemory { dispatch_slots, combine_slots, rows, .. } =
        options.memory(64).unwrap();
    assert_eq!(dispatch_slots, 0);
    // A token has a slot for the result of each of its experts, also on 64 ranks.
    assert_eq!(combine_slots, 4096 * 8 * row);
    assert_eq!(rows, 20_000 * row + 16);
    assert_eq!(options.memory(2).unwrap().combine_slots, 4096 * 2 * row);
    // There is memory for no more rows than can arrive.
    let all = ExpertParallelOptions::new(7168, 1, 256, 8).throughput(20_000);
    assert_eq!(all.memory(2).unwrap().rows, 2 * 8 * row + 16);
    assert!(options.memory_in_teams(4, 2).is_err());
}
