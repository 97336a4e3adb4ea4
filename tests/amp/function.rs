//! Tests of what autocast does in a `Function`: as in PyTorch, or nothing with `WITHOUT_AUTOCAST`.

use super::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use tch_extension::autograd::{
    Context, Function, GradOptions, Inputs, Saver, Tensors, apply, grad,
};
use tch_extension::testing::devices;

#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Result,
    Error,
    Panic,
}

impl End {
    fn reached(self) -> Result<()> {
        match self {
            End::Result => Ok(()),
            End::Error => Err(Error::msg("as told")),
            End::Panic => panic!("as told"),
        }
    }
}

/// x, whose passes note in what kind a product runs, and end as they are told.
struct Noting<const WITHOUT: bool> {
    kinds: Arc<Mutex<Vec<Kind>>>,
    ends: [End; 2],
}

impl<const WITHOUT: bool> Noting<WITHOUT> {
    fn note(&self, x: &Tensor) -> Result<()> {
        // The cast of a leaf would be cached, and serve other kinds, too.
        let x = x.detach();
        let kind = x.f_matmul(&x)?.f_kind()?;
        self.kinds.lock().expect("unpoisoned").push(kind);
        // A region inside of the pass ends with it.
        let _inner = Autocast::new(x.device(), Kind::Half)?;
        assert_eq!(x.f_matmul(&x)?.f_kind()?, Kind::Half);
        Ok(())
    }
}

impl<const WITHOUT: bool> Function for Noting<WITHOUT> {
    const NAME: &'static str = "noting";
    const DOUBLE_BACKWARD: bool = true;
    const WITHOUT_AUTOCAST: bool = WITHOUT;

    fn forward(&mut self, _: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let x = inputs.get(0)?;
        self.note(x)?;
        self.ends[0].reached()?;
        Ok(x.copy().into())
    }

    fn backward(&self, _: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let grad = grads.get(0)?;
        self.note(grad)?;
        self.ends[1].reached()?;
        Ok(grad.copy().into())
    }
}

/// The kinds of products in the passes. A region is open before them, and must be afterwards.
fn kinds<const WITHOUT: bool>(device: Device, ends: [End; 2], create_graph: bool) -> Vec<Kind> {
    let kinds = Arc::new(Mutex::new(Vec::new()));
    let noting = Noting::<WITHOUT> { kinds: Arc::clone(&kinds), ends };
    let x = weight(&[2, 2], device);
    let _region = Autocast::new(device, Kind::BFloat16).expect("a region");
    let run = || -> Result<()> {
        let y = apply(noting, &[Some(&x)])?.single()?;
        let options = GradOptions { create_graph, ..Default::default() };
        grad(&[&y.sum(Kind::Float)], &[&x], &options).map(drop)
    };
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let outcome = catch_unwind(AssertUnwindSafe(run));
    std::panic::set_hook(hook);
    let failed = !matches!(outcome, Ok(Ok(())));
    assert_eq!(failed, ends != [End::Result; 2], "{ends:?}");
    let after = x.detach().matmul(&x.detach()).kind();
    assert_eq!((after, Autocast::kind(device)), (Kind::BFloat16, Some(Kind::BFloat16)), "{ends:?}");
    let kinds = kinds.lock().expect("unpoisoned");
    kinds.clone()
}

#[test]
fn autocast_casts_in_a_function_unless_it_is_without() {
    let _alone = alone();
    for device in devices() {
        for create_graph in [false, true] {
            let ends = [End::Result; 2];
            assert_eq!(kinds::<false>(device, ends, create_graph), [Kind::BFloat16; 2]);
            assert_eq!(kinds::<true>(device, ends, create_graph), [Kind::Float; 2]);
        }
    }
}

#[test]
fn a_region_goes_on_after_a_pass_that_failed() {
    let _alone = alone();
    for device in devices() {
        for end in [End::Error, End::Panic] {
            assert_eq!(kinds::<true>(device, [end, End::Result], false), [Kind::Float]);
            assert_eq!(kinds::<true>(device, [End::Result, end], false), [Kind::Float; 2]);
        }
    }
}
