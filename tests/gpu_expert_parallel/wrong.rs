//! Tests of wrong routing, of refused arguments, and of ranks that do not come.

use std::time::Duration;

use devcomm::{
    Buffer, Context, DeviceSlice, Error, ExpertParallelOptions, F8E4M3, LaunchError, Result, Tokens,
};
use devcomm_testing::experts::{Batch, Layout, Routing};
use devcomm_testing::machines::{Gpus, on_gpus};
use half::bf16;

use super::{FORMS, IN_HALVES, Memory, WHOLE, checked_step, few, options};

#[test]
fn experts_that_do_not_exist_are_dropped_and_reported() {
    on_gpus("experts_that_do_not_exist_are_dropped_and_reported", 2, |rank| {
        let batch = Batch::new(64, 8, 4, &[5, 5], 1).routed(Routing::Random, 1);
        for memory in Memory::of_each(rank, &batch, 5)? {
            let mut batch = batch.without(&[]);
            checked_step(rank, &memory, &batch, WHOLE)?;
            for ids in &mut batch.ids {
                (ids[6], ids[9], ids[19]) = (8, i32::MIN, i32::MAX);
            }
            let error = checked_step(rank, &memory, &batch, IN_HALVES).unwrap_err().to_string();
            assert!(error.contains("3 experts of tokens do not exist"), "{error}");
            // One of them is named, whichever is reported first.
            let named = ["8, number 2 of token 1", "-2147483648, number 1", "2147483647, number 3"];
            assert!(named.iter().any(|text| error.contains(text)), "{error}");
            // The error is reported once.
            memory.experts.check()?;
        }
        Ok(())
    });
}

#[test]
fn rows_for_which_there_is_no_room_are_reported() {
    on_gpus("rows_for_which_there_is_no_room_are_reported", 2, |rank| {
        let batch = Batch::new(64, 8, 4, &[5, 5], 1).routed(Routing::Random, 1);
        let memory = Memory::of(rank, &batch, 5)?;
        memory.write(rank, &batch)?;
        let layout = batch.layout(rank.rank());
        let (needed, room) = (layout.rows.len(), 7);
        let rows = memory.rows.slice(..room * batch.hidden)?;
        memory.experts.dispatch(memory.tokens(5), &memory.stream)?;
        memory.experts.group(&rows, &memory.stream)?;
        // The results arrive nevertheless.
        memory.experts.combine(&rows, &memory.output, None, &memory.stream)?;
        let mut got = vec![bf16::ZERO; memory.rows.len()];
        memory.rows.copy_to_host(&mut got)?;
        let (arrived, rest) = got.split_at(room * batch.hidden);
        let layout = Layout { rows: layout.rows[..room].to_vec(), ..layout };
        assert_eq!(batch.count_wrong_rows(&layout, arrived), 0);
        assert!(rest.iter().all(|x| x.is_nan()), "wrote past the last row");
        let error = memory.experts.check().unwrap_err().to_string();
        let text = format!("need {needed} rows, and there was room for {room}");
        assert!(error.contains(&text), "{error}");
        // Another `group`, with room for all rows, is not the one that is reported.
        memory.experts.group(&rows, &memory.stream)?;
        memory.experts.group(&memory.rows, &memory.stream)?;
        let error = memory.experts.check().unwrap_err().to_string();
        assert!(error.contains(&text), "{error}");
        // An expert that does not exist does not hide the missing rows.
        let mut batch = batch.without(&[]);
        batch.ids.iter_mut().for_each(|ids| ids[6] = 8);
        memory.write(rank, &batch)?;
        memory.experts.dispatch(memory.tokens(5), &memory.stream)?;
        memory.experts.group(&rows, &memory.stream)?;
        memory.experts.combine(&rows, &memory.output, None, &memory.stream)?;
        let error = memory.experts.check().unwrap_err().to_string();
        let both = ["1 experts of tokens do not exist", "there was room for 7"];
        assert!(both.iter().all(|text| error.contains(text)), "{error}");
        memory.experts.check()
    });
}

#[test]
fn what_cannot_be_done_is_refused() {
    on_gpus("what_cannot_be_done_is_refused", 2, |rank| {
        let comm = rank.communicator()?;
        let refused = |options: ExpertParallelOptions, why: &str| {
            let error = options.build(comm).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        };
        let new = ExpertParallelOptions::new;
        refused(new(12, 4, 8, 2), "12 elements");
        refused(new(8200, 4, 8, 2), "8200 elements");
        refused(new(192, 4, 8, 2).f8(), "a multiple of 128");
        refused(new(64, 4, 7, 2), "7 experts on 2 ranks");
        refused(new(64, 4, 1026, 2), "at most 1024");
        refused(new(64, 4, 8, 17), "17 experts");
        refused(new(64, 0, 8, 2), "up to 0 tokens");
        refused(new(64, 4, 8, 2).alignment(0), "multiples of 0");
        refused(new(64, 4, 8, 2).threads(33), "33 threads");
        refused(new(64, 4 + rank.rank(), 8, 2), "rank ");

        let batch = Batch::new(64, 8, 2, &[4, 4], 1).routed(Routing::Random, 1);
        let memory = Memory::of(rank, &batch, 4)?;
        let Memory { experts, stream, rows, output, .. } = &memory;
        let refused = |result: Result<()>, why: &str| {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        };
        memory.write(rank, &batch)?;
        refused(experts.group(rows, stream), "no tokens have been received");
        let (f8, scales) = (comm.mem_alloc::<F8E4M3>(64)?, comm.mem_alloc::<f32>(64)?);
        refused(experts.group_f8(&f8, &scales, stream), "no 8-bit floats");
        refused(experts.dispatch(memory.tokens(5), stream), "memory for 4");
        let input = memory.input.slice(..64 * 3)?;
        let short = Tokens { count: 4, input: &input, ids: &memory.ids, weights: &memory.weights };
        refused(experts.dispatch(short, stream), "the tokens' rows has 192 elements");
        let input = memory.input.slice(1..65)?;
        let odd = Tokens { count: 1, input: &input, ids: &memory.ids, weights: &memory.weights };
        refused(experts.dispatch(odd, stream), "not a multiple of 16");
        refused(experts.combine(rows, output, None, stream), "in no order");
        let sent = experts.start_dispatch(memory.tokens(4), stream)?;
        refused(experts.dispatch(memory.tokens(4), stream), "not received yet");
        refused(experts.group(rows, stream), "not received yet");
        sent.receive()?;
        refused(experts.combine(rows, output, None, stream), "in no order");
        experts.group(rows, stream)?;
        refused(experts.set_absent(&[2], stream), "rank 2 is absent");
        refused(experts.set_absent(&[rank.rank()], stream), "than this one");
        let few = output.slice(..64)?;
        refused(experts.combine(rows, &few, None, stream), "the output has 64 elements");
        experts.combine(rows, output, None, stream)?;
        memory.check_output(&batch.combined(rank.rank(), None, |_| 1.0))
    });
}

#[test]
fn buffers_of_experts_that_overlap_are_refused() {
    on_gpus("buffers_of_experts_that_overlap_are_refused", 2, |rank| {
        let batch = Batch::new(128, 8, 2, &[4, 4], 1).routed(Routing::Random, 1);
        let refused = |result: Result<()>, names: &str| {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(&format!("{names} overlap")), "{error}");
        };
        for memory in Memory::of_each(rank, &batch, 4)? {
            memory.write(rank, &batch)?;
            let Memory { experts, stream, rows, output, .. } = &memory;
            if let Ok(arrivals) = experts.rows() {
                let tokens = Tokens { input: &arrivals.slice(128..)?, ..memory.tokens(1) };
                let names = "the tokens' rows and the memory in which rows arrive";
                refused(experts.dispatch(tokens, stream), names);
            }
            experts.dispatch(memory.tokens(4), stream)?;
            experts.group(rows, stream)?;
            let names = "the experts' results and the output";
            for first in [0, 128, rows.len() - 4 * 128] {
                refused(experts.combine(rows, &rows.slice(first..)?, None, stream), names);
            }
            // The output may be the residual, as a whole.
            let both = rank.communicator()?.mem_alloc::<bf16>(6 * 128)?;
            both.fill_bytes(0)?;
            let [to, residual] = [both.slice(128..)?, both.slice(..4 * 128)?];
            let names_of_both = "the residual and the output";
            refused(experts.combine(rows, &to, Some(&residual), stream), names_of_both);
            let returning = experts.start_combine(rows, stream)?;
            refused(returning.receive(rows, None), names);
            refused(returning.receive(&to, Some(&residual)), names_of_both);
            returning.receive(&to, Some(&to))?;
            stream.copy(&to.slice(..4 * 128)?, &output.slice(..)?)?;
            memory.check_output(&batch.combined(rank.rank(), None, |_| 1.0))?;
        }
        // Scales may be in the memory of rows only if other types have the same addresses.
        let memory = Memory::new(rank, few(rank, options(&batch, 4)).f8(), &batch, 4)?;
        memory.write(rank, &batch)?;
        let Memory { experts, stream, rows, .. } = &memory;
        experts.dispatch(memory.tokens(4), stream)?;
        let (context, address) = (rank.context(), rows.device_address());
        let len = rows.len();
        // SAFETY: this is the memory of `rows`, which lasts longer.
        let (f8, scales) = unsafe {
            let f8 = DeviceSlice::<F8E4M3>::from_raw_parts(context, address, len);
            (f8, DeviceSlice::<f32>::from_raw_parts(context, address + 4 * 128, len / 128))
        };
        let names = "the scales of the rows and the rows of the experts";
        refused(experts.group_f8(&f8, &scales, stream), names);
        stream.synchronize()
    });
}

/// The other ranks would take part in a call that is refused later, and wait for its kernel.
#[test]
fn a_stream_of_another_context_is_refused_before_ranks_compare_the_call() {
    let name = "a_stream_of_another_context_is_refused_before_ranks_compare_the_call";
    on_gpus(name, 2, |rank| {
        let batch = Batch::new(64, 8, 2, &[4, 4], 1).routed(Routing::Random, 1);
        let memory = Memory::of(rank, &batch, 4)?;
        memory.write(rank, &batch)?;
        let Memory { experts, stream, rows, output, .. } = &memory;
        let foreign = Context::new(rank.device())?.stream()?;
        let refused = |result: Result<()>| {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("the stream belongs to another CUDA context"), "{error}");
        };
        if rank.is_root() {
            refused(experts.dispatch(memory.tokens(4), &foreign));
        }
        experts.dispatch(memory.tokens(4), stream)?;
        experts.group(rows, stream)?;
        if rank.is_root() {
            refused(experts.start_combine(rows, &foreign).map(drop));
        }
        experts.combine(rows, output, None, stream)?;
        memory.check_output(&batch.combined(rank.rank(), None, |_| 1.0))
    });
}

#[test]
fn an_error_between_the_halves_of_an_operation_leaves_its_object_usable() {
    on_gpus("an_error_between_the_halves_of_an_operation_leaves_its_object_usable", 2, |rank| {
        let batch = Batch::new(64, 8, 2, &[4, 3], 1).routed(Routing::Random, 1);
        for memory in Memory::of_each(rank, &batch, 4)? {
            memory.write(rank, &batch)?;
            let Memory { experts, stream, rows, output, .. } = &memory;
            let (tokens, fails) = (|| memory.tokens(batch.tokens[rank.rank()]), rank.is_root());
            let few = output.slice(..64)?;
            let too_short = |result: Result<()>| {
                let error = result.unwrap_err().to_string();
                assert!(error.contains("the output has 64 elements"), "{error}");
            };
            // The tokens of a half that was dropped are received by the next operation.
            let sent = experts.start_dispatch(tokens(), stream)?;
            if fails {
                drop(sent)
            } else {
                sent.receive()?
            }
            experts.group(rows, stream)?;
            // A half can be used again after an error, and not after it has been received.
            let returning = experts.start_combine(rows, stream)?;
            if fails {
                too_short(returning.receive(&few, None));
            }
            returning.receive(output, None)?;
            memory.check_output(&batch.combined(rank.rank(), None, |_| 1.0))?;
            let again = returning.receive(output, None).unwrap_err().to_string();
            assert!(again.contains("received already"), "{again}");
            // What was received has nothing to do with what is sent later.
            let later = experts.start_combine(rows, stream)?;
            drop(returning);
            let refused = experts.group(rows, stream).unwrap_err().to_string();
            assert!(refused.contains("results that were sent are not received yet"), "{refused}");
            later.receive(output, None)?;
            // The results of a half that was dropped are discarded, and the steps go on.
            let returning = experts.start_combine(rows, stream)?;
            match fails {
                true => too_short(returning.receive(&few, None)),
                false => returning.receive(output, None)?,
            }
            drop(returning);
            checked_step(rank, &memory, &batch, WHOLE)?;
            // A capture that ends between the halves, as on an error, leaves the object usable too.
            let ended = stream.capture(|| {
                let _sent = experts.start_dispatch(tokens(), stream)?;
                experts.group(rows, stream)
            });
            let refused = ended.unwrap_err().to_string();
            assert!(refused.contains("tokens that were sent are not received yet"), "{refused}");
            checked_step(rank, &memory, &batch, WHOLE)?;
            memory.experts.check()?;
        }
        Ok(())
    });
}

/// Ranks that do not come leave a rank's kernel waiting. With one token a combine is one round.
#[test]
fn the_host_ends_waits_for_ranks_that_do_not_come() {
    let all = [(false, 5), (true, 5), (true, 1)];
    let f8 = [false, true];
    let cases = [2, 3].into_iter().flat_map(|ranks| all.map(|case| (ranks, case)));
    for (ranks, (combines, count)) in cases {
        let cases = f8.into_iter().flat_map(|is_f8| FORMS.map(|form| (is_f8, form)));
        for (is_f8, form) in cases.filter(|(is_f8, _)| !is_f8 || !combines) {
            let name = "the_host_ends_waits_for_ranks_that_do_not_come";
            Gpus::new(ranks).unchecked().run(name, |rank| {
                let batch = Batch::new(384, 2 * ranks, 2, &vec![count; ranks], 1);
                let batch = batch.routed(Routing::Random, 1);
                let options = form(few(rank, options(&batch, 5)));
                let options = if is_f8 { options.f8() } else { options };
                let memory = Memory::new(rank, options, &batch, 5)?;
                memory.write(rank, &batch)?;
                let Memory { experts, stream, rows, output, .. } = &memory;
                if combines {
                    experts.dispatch(memory.tokens(count), stream)?;
                    experts.group(rows, stream)?;
                }
                stream.synchronize()?;
                rank.barrier()?;
                if rank.rank() == 0 {
                    match combines {
                        false => experts.dispatch(memory.tokens(count), stream)?,
                        true => experts.combine(rows, output, None, stream)?,
                    }
                    let ended = stream.synchronize_within(Duration::from_millis(200));
                    let Err(Error::Launch(LaunchError::KernelAborted { rank: 0, stuck, .. })) =
                        ended
                    else {
                        panic!("the kernel was not ended: {ended:?}");
                    };
                    assert!(!stuck.is_empty());
                }
                rank.barrier()
            });
        }
    }
}

#[test]
fn memory_is_as_large_as_it_says() {
    let memory = ExpertParallelOptions::new(7168, 128, 256, 8).memory(2).unwrap();
    // Two banks of a row for each token of the peer.
    assert_eq!(memory.dispatch_slots, 2 * 128 * 14336);
    assert_eq!(memory.combine_slots, memory.dispatch_slots);
    assert_eq!(memory.rows, 2 * 128 * 14336);
    // Two banks of messages of two ranks: the number of tokens, the experts of each, and the end
    // of a combine.
    assert_eq!(memory.messages, 2 * 2 * (1 + 128 * 8 + 1) * 16);
    let all_slots = memory.dispatch_slots + memory.combine_slots;
    assert_eq!(memory.total(), all_slots + memory.messages + memory.rows + memory.routing);
    assert!(ExpertParallelOptions::new(7168, 128, 260, 8).memory(65).is_err());
}
