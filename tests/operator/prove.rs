//! `prove` finds what is wrong with a definition.

use super::unit_rows::{UnitRows, UnitRowsIn};
use tch::{Device, Kind, Tensor};
use tch_extension::operator::*;
use tch_extension::testing::prove;
use tch_extension::{Error, Result};

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

#[derive(Clone, Copy, Debug, PartialEq, Default)]
enum Fault {
    #[default]
    None,
    /// The rule gives the output another size.
    Size,
    /// The rule says that something is kept, and forward keeps it only for both gradients.
    Kept,
    /// The gradient of w alone does not read x.
    Reads,
    Reference,
    Gradient,
    /// The reference has the same wrong gradient.
    Both,
    /// The reference, from which second derivatives come, has right gradients only.
    Second,
}

tch_extension::signature! {
    /// `y = x w`, with a fault.
    Product: ProductIn -> ProductOut = "product"(x, w) -> (y) {
        /// What is wrong.
        fault: Fault,
    }
}

tch_extension::slots! {
    /// The first factor.
    struct Factor { x? }
}

impl Operator for Product {
    type Kept = Factor;
    type Plan = ();

    fn rule<D: Dim>(
        &self,
        of: &Metas<Self, D>,
        needs: &Needs<Self>,
    ) -> Result<Made<Self, Meta<D>>> {
        let x = of.x.sized(of.x.sizes());
        let y = if self.fault == Fault::Size { x.sized([]) } else { x.clone() };
        Ok(Made { outputs: ProductOut { y }, kept: Factor { x: needs.w.then_some(x) } })
    }

    fn reads(&self, needs: &Needs<Self>) -> Needs<Self> {
        ProductIn { x: false, w: needs.x && (self.fault != Fault::Reads || needs.w) }
    }

    fn forward(&self, call: &Call<'_, Self>) -> Result<Made<Self, Tensor>> {
        let needs = call.needs;
        let is_kept = needs.w && (self.fault != Fault::Kept || needs.x);
        let kept = Factor { x: is_kept.then(|| call.of.x.copy()) };
        Ok(Made { outputs: ProductOut { y: call.of.x * call.of.w }, kept })
    }

    fn backward(&self, grads: Incoming<Self>, again: Again<'_, Self>) -> Result<Gradients<Self>> {
        let Some(grad) = grads.y else { return Ok(ProductIn::none()) };
        let absent = || Error::msg("a factor is absent");
        let x = match again.needs.x {
            true => Some(&grad * again.of.w.as_ref().ok_or_else(absent)?),
            false => None,
        };
        let w = match again.needs.w {
            true => Some(&grad * again.kept.x.as_ref().ok_or_else(absent)?),
            false => None,
        };
        let w = match self.fault {
            Fault::Gradient | Fault::Both => w.map(|w| w * 0.5),
            _ => w,
        };
        Ok(ProductIn { x, w })
    }

    fn reference(&self, of: &Args<'_, Self>) -> Result<Outputs<Self>> {
        let y = of.x * of.w;
        Ok(ProductOut {
            y: match self.fault {
                Fault::Reference => y + 1.0,
                Fault::Both => of.x * (of.w * 0.5 + of.w.detach() * 0.5),
                Fault::Second => {
                    let (x, w) = (of.x.detach(), of.w.detach());
                    of.x * &w + &x * of.w - x * w
                }
                _ => y,
            },
        })
    }
}

fn proof(fault: Fault) -> Result<()> {
    let [x, w] = [(); 2].map(|()| Tensor::rand([2, 3], DOUBLE) + 0.5);
    prove(&Product { fault }, &ProductIn { x: &x, w: &w })
}

#[test]
fn right_operators_are_proved() {
    proof(Fault::None).expect("nothing is wrong");
    let [x, weight] = [&[3, 4][..], &[4]].map(|size| Tensor::rand(size, DOUBLE) + 0.5);
    let mask = Tensor::rand([3], DOUBLE);
    for weight in [Some(&weight), None] {
        let of = UnitRowsIn { x: &x, weight, mask: &mask };
        prove(&UnitRows { scale: 2.0 }, &of).expect("nothing is wrong");
    }
}

#[test]
fn faults_are_found() {
    for (fault, words) in [
        (Fault::Size, "prove: product: rule: y: expected (Double, Cpu, []), as the rule says"),
        (
            Fault::Kept,
            "x: expected (Double, Cpu, [2, 3]), as the rule says, got nothing from forward, if a gradient is needed of w",
        ),
        (Fault::Reads, "prove: product: gradients: "),
        (Fault::Reference, "prove: product: values: y and the reference's: "),
        (Fault::Gradient, "prove: product: gradients: the gradient of w and the reference's: "),
        (Fault::Both, "gradcheck"),
        (Fault::Second, "gradgradcheck"),
    ] {
        let error = proof(fault).expect_err("there is a fault").to_string();
        assert!(error.contains(words), "{fault:?}: {error}");
    }
}
